"""`flowprefill bench goodput`: the load that each policy and granularity carries on the engine.

A stretch of a trace is replayed in this process on one engine after the other, all of one
model.json, which differ in policy and granularity alone. Measured are the highest load with 90% of
the requests on time, the same with 90% of every class, and the tightest objectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.bench.options import (
    Blocks,
    JsonOut,
    LengthDivisor,
    ModelJson,
    OutputTokens,
    Records,
    Seed,
    Trace,
    finite,
    load_config,
)
from flowprefill.bench.plotting import check_plots_folder
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.report import (
    VOID_EXIT_CODE,
    describe_machine,
    describe_run,
    print_json,
    print_void,
)

if TYPE_CHECKING:
    from flowprefill.bench.goodput_outcomes import CellResult
    from flowprefill.bench.goodput_plan import GoodputPlan
    from flowprefill.bench.goodput_runs import Cell, GoodputRuns

SCALE_LOAD = 0.7
"""Load at which the tightest objectives are searched, and TTFTs compared."""
EVALUATIONS = 3
"""Replays that a search takes, about."""
BUDGET_S = 25 * 60
"""Of all prefills, where nobody says how many requests. Starts of engines, looks at the machine's
speed and replays that are repeated make it some 35 minutes."""
TIMELINE_CELL = "s-edf/tile"
TIMELINE_REQUESTS = 100
"""Some ten thousand records."""


def run(
    trace: Trace,
    cells: Annotated[
        str | None,
        typer.Option(
            help="policy/granularity, separated by commas. Default: fcfs/whole; s-edf, goodput and "
            "srpt at tile, at their best chunks by simulation and at the common one."
        ),
    ] = None,
    slo_scales: Annotated[
        bool, typer.Option(help="Search the tightest objectives of s-edf as well.")
    ] = True,
    requests: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Requests of the trace, in one go; default: as many as take some 35 minutes.",
        ),
    ] = None,
    blocks: Blocks = 10,
    length_divisor: LengthDivisor = 8.0,
    output_tokens: OutputTokens = 1,
    slo_scale: Annotated[
        float,
        typer.Option(
            min=0.01,
            callback=finite,
            help="Times the TTFT objectives, for all that is measured.",
        ),
    ] = 1.0,
    records: Records = None,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Folder for pictures. To compare TTFTs, fcfs/whole, s-edf/tile, s-edf at the "
            f"common chunk and goodput/tile are measured at load {SCALE_LOAD:g} too."
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="JSON file for ui.perfetto.dev: what the device does when, slice by slice, with "
            f"the first {TIMELINE_REQUESTS} requests on {TIMELINE_CELL}, or the first cell."
        ),
    ] = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure the highest load with 90% on time, for several policies and granularities.

    If the requests of any replay were sent more than 5 ms late (99th percentile) the figures are
    void: exit code 3.
    """
    from rich.console import Console

    from flowprefill.bench import goodput_plots
    from flowprefill.bench.goodput_outcomes import OutcomeStore
    from flowprefill.bench.goodput_plan import (
        check_blocks,
        make_plan,
        num_searches,
        requests_within,
    )
    from flowprefill.bench.goodput_report import make_tables, summarise
    from flowprefill.bench.goodput_runs import GoodputRuns, check_same_knobs, with_cell
    from flowprefill.bench.simulate_plan import measured_plan
    from flowprefill.bench.this_cpu import paced_cpu

    if plots is not None:
        check_plots_folder(plots)
    if requests is not None:
        check_blocks(requests, blocks)
    config = load_config(model_json, None)
    names = tuple(cells.split(",")) if cells else ()
    with bench_progress(None) as progress:
        platform, pace = paced_cpu(config, progress.show_loading)
        requests = requests or requests_within(
            BUDGET_S, trace, platform, 1 / length_divisor, EVALUATIONS * num_searches(names)
        )
        options = measured_plan(
            platform, trace, requests, output_tokens, 1 / length_divisor, SCALE_LOAD, slo_scale
        )
        plan = make_plan(options, blocks, names, progress.describe)
        facts = {
            "trace": trace.name,
            "requests": requests,
            "blocks": blocks,
            "length_divisor": length_divisor,
            "output_tokens": output_tokens,
            "slo_scale": slo_scale,
        }
        check_same_knobs([with_cell(config, cell) for cell in plan.guesses])
        store = OutcomeStore(records, key=f"{config} {seed} {facts} {plan.scale}")
        with contextlib.closing(GoodputRuns(config, plan, seed, progress, store, pace)) as runs:
            results = measure(runs, plan, slo_scales, plots is not None, progress)
            if timeline is not None:
                goodput_plots.write_timeline(runs, plan, facts, timeline)
    result = summarise(plan, results, seed)
    if plots is not None:
        subject = f"{trace.stem}, prompts / {length_divisor:g}\n{describe_machine(config)}"
        pictures = goodput_plots.draw(plan, results, subject, plots, trace.stem)
        result["pictures"] = [picture.name for picture in pictures]
    for table in make_tables(plan, result):
        Console(width=150).print(table)
    if result["void"]:
        print_void(result["send_lag_p99_ms"])
    print_json({**result, "run": {**describe_run(config, seed), **facts}}, json_out)
    raise typer.Exit(VOID_EXIT_CODE if result["void"] else 0)


def measure(
    runs: GoodputRuns,
    plan: GoodputPlan,
    with_slo_scales: bool,
    with_plots: bool,
    progress: BenchProgress,
) -> dict[Cell, CellResult]:
    """Measure each cell near where it is expected to fail; with_plots: some at SCALE_LOAD too."""
    from flowprefill.bench.goodput_outcomes import (
        CellResult,
        attainment,
        search_loads,
        worst_class_attainment,
    )
    from flowprefill.bench.goodput_plots import shown_cells

    results: dict[Cell, CellResult] = {}
    searches: list[Callable[[], None]] = []
    for cell, guesses in plan.guesses.items():
        results[cell] = result = CellResult()
        measure_at = partial(runs.measure, cell)
        searches.append(partial(search_loads, measure_at, guesses[0], attainment, result))
        if cell in plan.every_class_cells:
            searches.append(
                partial(search_loads, measure_at, guesses[1], worst_class_attainment, result)
            )
        if with_slo_scales and cell in plan.tightness_guesses:
            guess = plan.tightness_guesses[cell]
            searches.append(partial(search_tightness, runs, cell, guess, result))
        if with_plots and cell in shown_cells(plan):
            searches.append(partial(measure_scale_load, runs, cell, result))
    for index, search in enumerate(searches):
        progress.expect(EVALUATIONS * (len(searches) - index))
        search()
    progress.expect(0)
    return results


def measure_scale_load(runs: GoodputRuns, cell: Cell, result: CellResult) -> None:
    """Measure the load that all cells of a picture of TTFTs have in common."""
    result.by_load[SCALE_LOAD] = runs.measure(cell, SCALE_LOAD)


def search_tightness(runs: GoodputRuns, cell: Cell, guess: float, result: CellResult) -> None:
    """Measure objectives on both sides of the tightest that TARGET meet."""
    from flowprefill.bench.crossing import search, snap
    from flowprefill.bench.goodput_outcomes import TARGET, attainment, curve

    def measure_at(tightness: float) -> None:
        scale = round(1 / tightness, 6)
        result.by_tightness[tightness] = runs.measure(cell, SCALE_LOAD, scale)

    search(measure_at, lambda: curve(result.by_tightness, attainment), snap(guess), TARGET)
