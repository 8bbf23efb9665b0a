"""`flowprefill bench scenarios`: the scenarios in which a time is judged, each against its bar.

What is judged by counts, order or bytes is in tests/scenarios; rows have the same numbers there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.bench.bars import add_bars, bar_table
from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.bench.scenarios.base import Result, Scenario
from flowprefill.config import EngineConfig

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.scenarios.rig import Rig


def run(
    only: Annotated[
        str | None, typer.Option(help="Scenarios by name, separated by commas; default: all.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Repetitions in each scenario.")] = 3,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Do to a real server what burnt operators of others, and hold its times to their bars. Exit
    code 1: a bar is missed."""
    from rich.console import Console

    chosen = choose(all_scenarios(), only)
    config = load_model_json(model_json)
    results, words = measure(chosen, config, seed, rounds)
    Console().print(make_table(results))
    facts = {"rounds": rounds, **words, **describe_run(config, seed)}
    print_json({**{r.scenario.name: r.to_json() for r in results}, "run": facts}, json_out)
    if not all(result.is_met for result in results):
        raise typer.Exit(1)


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

    Returns also C in tokens and the tick in milliseconds, by which prompts and bars are sized.
    """
    from flowprefill.bench.scenarios.rig import Rig

    results = []
    with bench_progress(1 + len(scenarios)) as progress:
        progress.describe("starting tritonserver")
        with Rig(config, seed, rounds) as rig:
            words = {"tokens_per_tick": rig.tokens_per_tick, "tick_ms": 1000 * rig.tick_s}
            progress.advance()
            for scenario in scenarios:
                with progress.step(scenario.name):
                    results.append(play(scenario, rig))
    return results, words


def play(scenario: Scenario, rig: Rig) -> Result:
    """Whatever goes wrong in it is its result, and costs the others nothing."""
    try:
        return Result(scenario, list(scenario.measure(rig)))
    except BenchmarkError as error:
        return Result(scenario, error=str(error))
    except Exception as error:
        return Result(scenario, error=f"{type(error).__name__}: {error}")


def make_table(results: Sequence[Result]) -> Table:
    """One row per bar."""
    table = bar_table("Scenarios in which a time is judged", ("row", "scenario"))
    for result in results:
        head = (str(result.scenario.row), result.scenario.name)
        if result.error:
            table.add_row(*head, f"failed: {result.error}", "", "", "no", end_section=True)
        else:
            add_bars(table, result.bars, head)
    return table
