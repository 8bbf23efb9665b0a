"""`flowprefill bench soak`: mixed traffic for minutes, with faults of clients and two engine kills.

A real server with its OpenAI endpoint. What is judged: every client gets an end, controls keep
their bytes, nothing fails but by a kill, memory and /dev/shm stay flat after the warm-up, at the
end the engine is empty and the server's counts add up.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.report import describe_run, load_model_json, print_json
from flowprefill.bench.scenarios.base import Bar

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.soak.run import Soak
    from flowprefill.bench.soak.traffic import Record

MAX_MODEL_LEN = 2048
"""So that all of the KV cache has been used, and is resident, soon."""
LONG_MINUTES = 20.0
GROWTH_LIMIT, SHORT_GROWTH_LIMIT = 0.02, 0.15
"""Of memory after the warm-up. A run of less than LONG_MINUTES is warm-up for the most part: its
limit finds only what would fill a machine within hours, and engines are not judged: killed twice,
none lives long enough."""


def run(
    minutes: Annotated[float, typer.Option(min=0.5, help="How long clients send.")] = 30.0,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Send mixed traffic for minutes, with faults and two engine kills. Exit code 1: a bar is
    missed."""
    from rich.console import Console

    from flowprefill.bench.soak.run import measure

    config = load_model_json(model_json)
    max_model_len = min(config.max_model_len or MAX_MODEL_LEN, MAX_MODEL_LEN)
    config = dataclasses.replace(config, max_model_len=max_model_len)
    soak = asyncio.run(measure(config, minutes, seed))
    bars = judge(soak, minutes)
    console = Console()
    console.print(count_table(soak.record))
    console.print(bar_table(bars))
    for problem in soak.record.problems:
        console.print(f"problem: {problem}", markup=False)
    facts = {"minutes": minutes, **describe_run(config, seed)}
    print_json({**summarise(soak, bars), "run": facts}, json_out)
    if not all(bar.is_met for bar in bars):
        raise typer.Exit(1)


def judge(soak: Soak, minutes: float) -> list[Bar]:
    """All that must hold."""
    record = soak.record
    limit = GROWTH_LIMIT if minutes >= LONG_MINUTES else SHORT_GROWTH_LIMIT
    bars = [
        Bar("clients without an end", record.num_hung, 0, ""),
        Bar("controls with other bytes", record.num_changed, 0, ""),
        Bar("answers that were wrong", record.num_wrong, 0, ""),
        Bar("gauges that are not 0 at rest", len(soak.busy_at_end), 0, ""),
        Bar("requests that the counts have lost", abs(soak.unbalanced), 0, ""),
    ]
    for role, share in soak.watch.growth().items():
        bars.append(Bar(f"growth of {role} after warm-up", 100 * share, 100 * limit, "%"))
    bars.append(Bar("slowest end of a request", record.slowest_s, None))
    for name, times_s in (("on the metrics page", soak.unready_s), ("over", soak.restarts_s)):
        bars += [Bar(f"until a kill is {name}", seconds, None) for seconds in times_s]
    return bars


def summarise(soak: Soak, bars: list[Bar]) -> dict[str, Any]:
    """The figures of the JSON line."""
    record = soak.record
    counts: dict[str, dict[str, int]] = {}
    for (kind, outcome), number in sorted(record.outcomes.items()):
        counts.setdefault(kind, {})[outcome] = number
    return {
        "requests": counts,
        "num_requests": sum(record.outcomes.values()),
        "num_hung": record.num_hung,
        "num_changed": record.num_changed,
        "num_wrong": record.num_wrong,
        "problems": record.problems,
        "unready_s": [round(seconds, 2) for seconds in soak.unready_s],
        "restarts_s": [round(seconds, 2) for seconds in soak.restarts_s],
        "slowest_end_s": round(record.slowest_s, 2),
        "busy_at_end": soak.busy_at_end,
        "unbalanced": soak.unbalanced,
        "growth": {role: round(share, 4) for role, share in soak.watch.growth().items()},
        "last_mb": {role: round(size, 1) for role, size in soak.watch.megabytes().items()},
        "is_met": all(bar.is_met for bar in bars),
    }


def count_table(record: Record) -> Table:
    """Requests by kind and outcome."""
    from rich.table import Table

    from flowprefill.bench.soak.traffic import OUTCOMES

    table = Table("requests", title="What came of them")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    for kind in sorted({kind for kind, _ in record.outcomes}):
        table.add_row(kind, *(str(record.outcomes[(kind, outcome)]) for outcome in OUTCOMES))
    return table


def bar_table(bars: list[Bar]) -> Table:
    """One row per bar."""
    from rich.table import Table

    table = Table("what", title="Soak")
    for heading in ("measured", "at most", "met"):
        table.add_column(heading, justify="right")
    for bar in bars:
        limit = "" if bar.limit is None else f"{bar.limit:g} {bar.unit}"
        met = "" if bar.limit is None else "yes" if bar.is_met else "no"
        table.add_row(bar.what, f"{bar.measured:.4g} {bar.unit}", limit, met)
    return table
