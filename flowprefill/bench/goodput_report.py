"""What `flowprefill bench goodput` reports: highest loads, their ratios and how sure they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flowprefill.bench.compared import BASELINE, best_cell, compared_cells
from flowprefill.bench.crossing import bootstrap, crossing
from flowprefill.bench.goodput import SCALE_LOAD
from flowprefill.bench.goodput_outcomes import (
    TARGET,
    CellResult,
    Measure,
    Outcome,
    attainment,
    send_lag_p99_s,
    ttft_by_class,
    worst_class_attainment,
)
from flowprefill.bench.goodput_plan import GoodputPlan, common_chunk
from flowprefill.bench.goodput_runs import Cell
from flowprefill.metrics import percentile
from flowprefill.replay.records import send_lag_figures
from flowprefill.replay.summary import send_lag_text

if TYPE_CHECKING:
    from rich.table import Table

Results = Mapping[Cell, CellResult]
Value = Callable[[Sequence[int]], float]
"""A figure of a sample of blocks."""


def summarise(plan: GoodputPlan, results: Results, seed: int) -> dict[str, Any]:
    """The JSON object. Rates are requests per second."""
    num_blocks = plan.num_blocks

    def estimate(value: Value) -> list[float]:
        return with_interval(value, num_blocks, seed)

    overall = {cell: max_load(result, attainment) for cell, result in results.items()}
    every_class = {
        cell: max_load(results[cell], worst_class_attainment)
        for cell in results
        if cell in plan.every_class_cells
    }
    tightness = {
        cell: _max_tightness(result) for cell, result in results.items() if result.by_tightness
    }
    everything = range(num_blocks)
    best = Cell.parse(best_cell({cell.name: overall[cell](everything) for cell in overall}))
    ratios = _ratios(plan, overall, every_class, tightness)
    rate = plan.rate_at_load_1
    max_loads = {c.name: estimate(v) for c, v in overall.items()}
    return {
        "max_rate_90": {name: scaled(loads, rate) for name, loads in max_loads.items()},
        "max_load_90": max_loads,
        "max_rate_90_every_class": {
            c.name: scaled(estimate(v), rate) for c, v in every_class.items()
        },
        "min_slo_scale_90": {
            c.name: [round(1 / x, 4) for x in estimate(v)] for c, v in tightness.items()
        },
        "best": best.name,
        **{name: estimate(value) for name, value in ratios.items()},
        "cells": {cell.name: load_points(result) for cell, result in results.items()},
        "objectives_s": class_objectives(plan),
        "offline_bound_fraction": _bound_fraction(plan, results[best]),
        **send_lags(results.values()),
    }


def max_load(result: CellResult, measure_of: Measure) -> Value:
    """Highest load of a sample of blocks."""

    def value(indices: Sequence[int]) -> float:
        curve = {
            load: measure_of([outcomes[i] for i in indices])
            for load, outcomes in result.by_load.items()
        }
        return crossing(curve, TARGET)

    return value


def _max_tightness(result: CellResult) -> Value:
    return max_load(CellResult(by_load=result.by_tightness), attainment)


def _ratios(
    plan: GoodputPlan,
    overall: Mapping[Cell, Value],
    every_class: Mapping[Cell, Value],
    tightness: Mapping[Cell, Value],
) -> dict[str, Value]:
    """Ratios of highest loads, block by block: those whose cells were measured."""
    everything = range(plan.num_blocks)
    baseline, s_edf = Cell.parse(BASELINE), Cell("s-edf", "tile")
    loads = {cell.name: value(everything) for cell, value in overall.items()}
    ratios = {
        name: ratio_of(overall[Cell.parse(above)], overall[Cell.parse(below)])
        for name, (above, below) in compared_cells(loads, common_chunk(plan.length_scale)).items()
    }
    if s_edf in every_class and baseline in every_class:
        ratios["ratio_to_fcfs_every_class"] = ratio_of(every_class[s_edf], every_class[baseline])
    tight_chunks = [c for c in tightness if c.granularity.startswith("chunk")]
    if s_edf in tightness and tight_chunks:
        tightest = max(tight_chunks, key=lambda cell: tightness[cell](everything))
        ratios["slo_scale_ratio_to_best_chunk"] = ratio_of(tightness[tightest], tightness[s_edf])
    return ratios


def ratio_of(above: Value, below: Value) -> Value:
    """Of two figures of the same sample of blocks."""
    return lambda indices: above(indices) / max(below(indices), 1e-9)


def with_interval(value: Value, num_blocks: int, seed: int) -> list[float]:
    """The figure over all blocks, and its 95% interval."""
    interval = bootstrap(value, num_blocks, seed)
    return [round(v, 4) for v in (value(range(num_blocks)), *interval)]


def load_points(result: CellResult) -> list[dict[str, Any]]:
    """Everything measured of a cell, by load."""
    return [_point(load, outcomes) for load, outcomes in sorted(result.by_load.items())]


def _point(load: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ttfts = ttft_by_class(outcomes)
    everyone = [ttft for values in ttfts.values() for ttft in values]
    num_requests = sum(o.num_requests for o in outcomes)
    return {
        "load": load,
        "attainment": round(attainment(outcomes), 4),
        "attainment_by_class": {
            name: round(
                sum(o.on_time_by_class.get(name, 0) for o in outcomes) / len(ttfts[name]), 4
            )
            for name in sorted(ttfts)
        },
        "ttft_s": _percentiles(everyone),
        "ttft_s_by_class": {name: _percentiles(ttfts[name]) for name in sorted(ttfts)},
        "server_ttft_s": _percentiles([s for o in outcomes for s in o.server_ttft_s]),
        "ttft_outside_server_s": _percentiles([s for o in outcomes for s in o.outside_server_s]),
        "tbt_s": _percentiles([gap for o in outcomes for gap in o.gaps_s]),
        "blocking_ms": _percentiles([1000 * s for o in outcomes for s in o.blocking_s]),
        "preemptions_per_request": round(
            sum(o.num_preemptions for o in outcomes) / num_requests, 3
        ),
        "decisions_per_request": round(sum(o.num_decisions for o in outcomes) / num_requests, 3),
        "slowdown": round(outcomes[0].slowdown, 3),
        "drift": round(outcomes[0].drift, 3),
        **send_lag_figures(send_lag_p99_s(outcomes)),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {f"p{q}": round(percentile(values, q), 4) for q in (50, 90, 99)}


def send_lags(results: Iterable[CellResult]) -> dict[str, Any]:
    """How late requests were sent in the latest of all replays: if too late, nothing here counts.

    Not over all replays together: among many the one that a figure rests on would not show.
    """
    replays = itertools.chain.from_iterable(result.replays() for result in results)
    return send_lag_figures(max(map(send_lag_p99_s, replays)))


def class_objectives(plan: GoodputPlan) -> dict[str, float]:
    """TTFT objective of the first request of each class; those of a class are alike, or in
    proportion to their lengths."""
    goals = {goal.name: round(goal.ttft_s, 4) for goal in reversed(plan.window.objectives)}
    return dict(sorted(goals.items()))


def _bound_fraction(plan: GoodputPlan, result: CellResult) -> dict[str, float | None]:
    """Requests on time over the most that any schedule could serve, by load."""
    return {
        f"{load:g}": _share_of_bound(plan, load, outcomes)
        for load, outcomes in sorted(result.by_load.items())
    }


def _share_of_bound(plan: GoodputPlan, load: float, outcomes: Sequence[Outcome]) -> float | None:
    bound = plan.offline_bound(load)
    return round(sum(o.num_on_time for o in outcomes) / bound, 4) if bound else None


def scaled(values: Sequence[float], factor: float) -> list[float]:
    return [round(value * factor, 3) for value in values]


def make_tables(plan: GoodputPlan, result: Mapping[str, Any]) -> list[Table]:
    """One of the highest loads, one of what was measured at each load."""
    from rich.table import Table

    highest = Table(title="Highest load with 90% on time [95% interval]; requests/s in brackets")
    highest.add_column("policy/granularity")
    headings = ("all requests", "every class", f"tightest objectives at load {SCALE_LOAD:g}")
    for heading in headings:
        highest.add_column(heading, justify="right")
    for name, load in result["max_load_90"].items():
        every_class = result["max_rate_90_every_class"].get(name)
        scale = result["min_slo_scale_90"].get(name)
        highest.add_row(
            name,
            f"{interval(load)} ({result['max_rate_90'][name][0]:.1f}/s)",
            interval([v / plan.rate_at_load_1 for v in every_class]) if every_class else "",
            interval(scale) if scale else "",
        )
    return [highest, points_table(result["cells"])]


def points_table(cells: Mapping[str, Any]) -> Table:
    """What was measured at each load.

    cells: load_points() of each
    """
    from rich.table import Table

    points = Table(title="At each load: on time, and TTFT in seconds")
    headings = ("policy/granularity", "load", "on time", "by class", "p50", "p99", "preempted")
    for heading in (*headings, "send lag p99"):
        points.add_column(heading)
    for name, rows in cells.items():
        for row in rows:
            by_class = " ".join(f"{k} {v:.2f}" for k, v in row["attainment_by_class"].items())
            points.add_row(
                name,
                f"{row['load']:.3g}",
                f"{row['attainment']:.3f}",
                by_class,
                f"{row['ttft_s']['p50']:.3f}",
                f"{row['ttft_s']['p99']:.3f}",
                f"{row['preemptions_per_request']:.2f}",
                send_lag_text(row["send_lag_p99_ms"], row["void"]),
            )
    return points


def interval(values: Sequence[float]) -> str:
    middle, low, high = values
    return f"{middle:.2f} [{min(low, high):.2f}, {max(low, high):.2f}]"
