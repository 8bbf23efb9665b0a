"""`flowprefill bench scenarios`: the scenarios in which a time is judged, each against its bar.

What is judged by counts, order or bytes is in tests/scenarios; rows have the same numbers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.bench.scenarios.base import Bar, Result, Scenario
from flowprefill.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table


def run(
    only: Annotated[
        str | None, typer.Option(help="Scenarios by name, separated by commas; default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions in each scenario.")] = 3,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Do to a real server what burnt operators of others, and hold its times to their bars."""
    from rich.console import Console

    chosen = choose(all_scenarios(), only)
    config = load_model_json(model_json)
    results, words = measure(chosen, config, seed, rounds)
    Console().print(make_table(results))
    facts = {"rounds": rounds, **words, **describe_run(config, seed)}
    print_json({**{r.scenario.name: r.to_json() for r in results}, "run": facts}, json_out)


def all_scenarios() -> list[Scenario]:
    """Those of every kind, by row."""
    from flowprefill.bench.scenarios import (
        cancellation,
        determinism,
        limits,
        observability,
        prefill_order,
        shutdown,
    )

    kinds = (prefill_order, limits, cancellation, determinism, observability, shutdown)
    return sorted((s for kind in kinds for s in kind.SCENARIOS), key=lambda s: s.row)


def choose(scenarios: Sequence[Scenario], only: str | None) -> list[Scenario]:
    """Those named, in the order of their rows. Raises BenchmarkError for a name nobody has."""
    if only is None:
        return list(scenarios)
    names = only.split(",")
    known = [s.name for s in scenarios]
    for name in names:
        if name not in known:
            raise BenchmarkError(f"scenario {name!r}: must be one of {', '.join(known)}")
    return [s for s in scenarios if s.name in names]


def measure(
    scenarios: Sequence[Scenario], config: EngineConfig, seed: int, rounds: int
) -> tuple[list[Result], dict[str, float]]:
    """Start a server and run the scenarios one after the other; progress on standard error.

    Returns also C in tokens and the tick in milliseconds, by which prompts and bars are sized. A
    scenario that fails is reported and costs the others nothing.
    """
    from flowprefill.bench.scenarios.rig import Rig
    from flowprefill_client import ServerError

    results = []
    with bench_progress(1 + len(scenarios)) as progress:
        progress.describe("starting tritonserver")
        with Rig(config, seed, rounds) as rig:
            words = {"tokens_per_tick": rig.tokens_per_tick, "tick_ms": 1000 * rig.tick_s}
            progress.advance()
            for scenario in scenarios:
                with progress.step(scenario.name):
                    try:
                        results.append(Result(scenario, list(scenario.measure(rig))))
                    except (BenchmarkError, ServerError) as error:
                        results.append(Result(scenario, error=str(error)))
    return results, words


def make_table(results: Sequence[Result]) -> Table:
    """One row per bar."""
    from rich.table import Table

    table = Table(title="Scenarios in which a time is judged")
    for heading in ("row", "scenario", "what"):
        table.add_column(heading)
    for heading in ("measured", "at most", "met"):
        table.add_column(heading, justify="right")
    for result in results:
        head = (str(result.scenario.row), result.scenario.name)
        if result.error:
            table.add_row(*head, f"failed: {result.error}", "", "", "no", end_section=True)
        for index, bar in enumerate(result.bars):
            is_last = index == len(result.bars) - 1
            table.add_row(*(head if index == 0 else ("", "")), *_cells(bar), end_section=is_last)
    return table


def _cells(bar: Bar) -> tuple[str, str, str, str]:
    limit = "" if bar.limit is None else f"{bar.limit:.3f} {bar.unit}"
    met = "" if bar.limit is None else "yes" if bar.is_met else "no"
    return bar.what, f"{bar.measured:.3f} {bar.unit}", limit, met
