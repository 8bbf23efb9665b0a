"""What a replay is told in: a table for people, figures for the JSON line, warnings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flowprefill.metrics import percentile
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.records import MAX_SEND_LAG_S, ReplayRecord, by_class, summarise

if TYPE_CHECKING:
    from rich.table import Table


def figures(plan: Sequence[PlannedRequest], records: Sequence[ReplayRecord]) -> dict[str, Any]:
    """All figures of a replay: those of records.summarise, and what was asked for.

    records: of those of the plan that ended; at least one
    """
    span_s = max(record.planned.due_s for record in records)
    return {
        **summarise(records, span_s),
        "num_planned": len(plan),
        "num_failed": sum(record.error is not None for record in records),
        "attainment_with_tbt": round(sum(map(_met_all, records)) / len(records), 4),
        "offered_rate": round(len(records) / span_s, 4) if span_s > 0 else None,
        "num_short_answers": sum(map(_is_short, records)),
        "num_wrong_prompts": sum(map(_had_another_prompt, records)),
    }


def _met_all(record: ReplayRecord) -> bool:
    return record.is_on_time and record.times.met_slo()


def _is_short(record: ReplayRecord) -> bool:
    return record.error is None and len(record.token_s) < record.planned.output_tokens


def _had_another_prompt(record: ReplayRecord) -> bool:
    return record.num_input_tokens not in (None, record.planned.input_tokens)


def warnings(result: dict[str, Any]) -> list[str]:
    """What makes the figures mean less than they seem to; the first is for a void replay."""
    found = []
    if result["void"]:
        found.append(void_line(result["send_lag_p99_ms"]))
    if result["num_short_answers"]:
        found.append(f"{result['num_short_answers']} answers are shorter than asked for")
    if result["num_wrong_prompts"]:
        found.append(
            f"{result['num_wrong_prompts']} prompts have another length by the server's count: "
            "its tokenizer is another one"
        )
    return found


def void_line(send_lag_p99_ms: float) -> str:
    """Why figures do not count. send_lag_p99_ms: of the replay that was sent latest"""
    return (
        f"VOID: requests were sent late (p99 {send_lag_p99_ms:.1f} ms, limit "
        f"{1000 * MAX_SEND_LAG_S:.0f} ms): this machine cannot replay the trace at this rate"
    )


def send_lag_text(p99_ms: float, is_void: bool) -> str:
    """Of one replay, for a table."""
    return f"{p99_ms:.1f} ms, void" if is_void else f"{p99_ms:.1f} ms"


def server_line(result: dict[str, Any]) -> str | None:
    """TTFT at both ends, where the server has told its own."""
    if "server_ttft_s" not in result:
        return None
    inside, outside = result["server_ttft_s"], result["ttft_outside_server_s"]
    return (
        f"TTFT in the server: p50 {_ms(inside['p50'])}, p99 {_ms(inside['p99'])} ms; the client "
        f"saw more by p50 {_ms(outside['p50'])}, p99 {_ms(outside['p99'])} ms"
    )


def make_table(records: Sequence[ReplayRecord]) -> Table:
    """A row for each SLO class and one for all. Raises ValueError for no records."""
    from rich.table import Table

    table = Table(title="on time = first token within its objective; TTFT from sending; ms")
    table.add_column("class")
    headings = ("requests", "on time", "TTFT p50", "p90", "p99", "TBT p50", "p99", "failed")
    for heading in headings:
        table.add_column(heading, justify="right")
    classes = by_class(records)
    for index, (name, members) in enumerate(classes.items()):
        table.add_row(name, *_cells(members), end_section=index == len(classes) - 1)
    table.add_row("all", *_cells(records))
    return table


def _cells(records: Sequence[ReplayRecord]) -> list[str]:
    ttfts_s = [record.ttft_s for record in records]
    gaps_s = [gap_s for record in records for gap_s in record.times.tbt_s]
    num_on_time = sum(record.is_on_time for record in records)
    return [
        str(len(records)),
        f"{num_on_time / len(records):.1%}",
        *(_ms(percentile(ttfts_s, q)) for q in (50, 90, 99)),
        *(_ms(percentile(gaps_s, q)) if gaps_s else "-" for q in (50, 99)),
        str(sum(record.error is not None for record in records)),
    ]


def _ms(value_s: float) -> str:
    """Where the percentile is a request that never got a token there is no number."""
    return f"{1000 * value_s:.1f}" if math.isfinite(value_s) else "never"
