"""`flowprefill bench soak`: mixed traffic for minutes, with faults of clients and two engine kills.

A real server with its OpenAI endpoint, and too little KV cache for all. What is judged: every
client gets an end and as many tokens as it asked for, controls keep their bytes, nothing fails but
by a kill, memory, /dev/shm, open files and threads stay flat after the warm-up, at the end the
engine is empty and the server's counts add up, and its stop leaves nothing.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.bars import Bar, add_bars, bar_table
from flowprefill.bench.options import JsonOut, ModelJson, Seed, finite
from flowprefill.bench.report import describe_run, load_model_json, print_json
from flowprefill.bench.soak.record import OUTCOMES, Record

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.soak.run import Soak

MAX_MODEL_LEN = 2048
"""So that all of the KV cache has been used, and is resident, soon."""
LONG_MINUTES = 20.0
GROWTH_LIMIT, SHORT_GROWTH_LIMIT = 0.02, 0.15
"""Of memory after the warm-up. A run of less than LONG_MINUTES is warm-up for the most part: its
limit finds only what would fill a machine within hours."""
MORE_LIMIT = 8
"""More open files, or threads, of a process after the warm-up: NUM_CLIENTS' connections come and
go, and pools fill up. One for each client that left would be tens of them within a minute."""


def run(
    minutes: Annotated[
        float, typer.Option(min=0.5, callback=finite, help="How long clients send.")
    ] = 30.0,
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
    table = bar_table("Soak")
    add_bars(table, bars)
    console.print(table)
    for problem in (*soak.record.problems, *soak.stop_problems):
        console.print(f"problem: {problem}", markup=False)
    facts = {"minutes": minutes, **describe_run(config, seed)}
    print_json({**summarise(soak, bars), "run": facts}, json_out)
    if not all(bar.is_met for bar in bars):
        raise typer.Exit(1)


def judge(soak: Soak, minutes: float) -> list[Bar]:
    """All that must hold."""
    record, rest = soak.record, soak.rest
    limit = GROWTH_LIMIT if minutes >= LONG_MINUTES else SHORT_GROWTH_LIMIT
    bars = [
        Bar("clients without an end", record.num_hung, 0, ""),
        Bar("controls with other bytes", record.num_changed, 0, ""),
        Bar("answers that were wrong", record.num_wrong, 0, ""),
        Bar("kills without a new engine", record.num_without_engine, 0, ""),
        Bar("gauges that are not 0 at rest", len(rest.busy), 0, ""),
        Bar("requests that the counts have lost", abs(rest.num_lost), 0, ""),
        Bar("faults of the server's stop", len(soak.stop_problems), 0, ""),
        Bar("evictions", rest.num_evictions, 1, "", is_floor=True),
        Bar("preemptions", rest.num_preemptions, 1, "", is_floor=True),
        Bar(
            "counted as cancelled, of those that surely were",
            rest.num_cancelled,
            record.num_surely_cancelled,
            "",
            is_floor=True,
        ),
    ]
    for role, share in soak.watch.growth().items():
        bars.append(Bar(f"growth of {role} after warm-up", 100 * share, 100 * limit, "%"))
    for what, found in (("files", soak.watch.more_files()), ("threads", soak.watch.more_threads())):
        for role, number in found.items():
            bars.append(Bar(f"more {what} of {role} after warm-up", number, MORE_LIMIT, ""))
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
        "num_without_engine": record.num_without_engine,
        "num_surely_cancelled": record.num_surely_cancelled,
        "problems": record.problems,
        "stop_problems": soak.stop_problems,
        "unready_s": [round(seconds, 2) for seconds in soak.unready_s],
        "restarts_s": [round(seconds, 2) for seconds in soak.restarts_s],
        "slowest_end_s": round(record.slowest_s, 2),
        "at_rest": dataclasses.asdict(soak.rest),
        "growth": {role: round(share, 4) for role, share in soak.watch.growth().items()},
        "more_files": soak.watch.more_files(),
        "more_threads": soak.watch.more_threads(),
        "last_mb": {role: round(size, 1) for role, size in soak.watch.megabytes().items()},
        "is_met": all(bar.is_met for bar in bars),
    }


def count_table(record: Record) -> Table:
    """Requests by kind and outcome."""
    from rich.table import Table

    table = Table("requests", title="What came of them")
    for outcome in OUTCOMES:
        table.add_column(outcome, justify="right")
    for kind in sorted({kind for kind, _ in record.outcomes}):
        table.add_row(kind, *(str(record.outcomes[(kind, outcome)]) for outcome in OUTCOMES))
    return table
