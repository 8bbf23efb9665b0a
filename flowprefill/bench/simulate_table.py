"""The table of `flowprefill simulate --table`: cells in many processes, means, paired intervals.

A cell is one policy at one granularity on one window of one trace. All cells of a window see the
same requests and the same prediction errors, so differences between cells are taken window by
window, and their intervals come from resampling the windows.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from flowprefill.bench.simulate_plan import Cell, Plan, take_window
from flowprefill.bench.simulate_rates import rates_and_ratios
from flowprefill.granularity import Granularity
from flowprefill.host_cpu import num_cpus
from flowprefill.simulator.measures import Measures, measure
from flowprefill.simulator.replay import Setup

if TYPE_CHECKING:
    from rich.table import Table

MEASURES = {
    "max_load_90": "highest load with 90% on time",
    "max_load_90_every_class": "highest load with 90% on time in every class",
    "min_slo_scale_90": "tightest objectives with 90% on time (factor, less is better)",
    "mean_ttft_s": "mean TTFT in seconds",
}
_IS_LESS_BETTER = {"min_slo_scale_90", "mean_ttft_s"}
_NUM_RESAMPLES = 10_000


Samples = dict[Cell, Measures]


def run(plan: Plan) -> dict[str, Any]:
    """Measure all cells on all cores, print the tables, return the JSON object."""
    samples = measure_table(plan, num_processes=num_cpus())
    results = {**summarise(plan, samples), **rates_and_ratios(plan, samples)}
    print_tables(plan, results)
    return results


def measure_table(plan: Plan, num_processes: int) -> Samples:
    """Measure all cells; shows progress on standard error."""
    from rich.console import Console
    from rich.progress import Progress

    cells = plan.cells()
    samples: Samples = {}
    context = multiprocessing.get_context("spawn")
    with (
        Progress(console=Console(stderr=True), refresh_per_second=1) as progress,
        ProcessPoolExecutor(num_processes, mp_context=context) as pool,
    ):
        task = progress.add_task(f"{len(cells)} cells", total=len(cells))
        futures = {pool.submit(measure_cell, plan, cell): cell for cell in cells}
        try:
            for future in as_completed(futures):
                samples[futures[future]] = future.result()
                progress.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return samples


def measure_cell(plan: Plan, cell: Cell) -> Measures:
    """Runs in a process of its own."""
    granularity = Granularity.parse(cell.granularity)
    seed = plan.error_seed(cell.seed)
    setup = Setup(cell.policy, granularity, plan.error, seed, plan.platform)
    found = take_window(plan, cell.trace, cell.seed)
    return measure(found.requests, setup, plan.load, found.objectives)


# ---- results ----------------------------------------------------------------------------------


def summarise(plan: Plan, samples: Samples) -> dict[str, Any]:
    """The JSON object: means over all windows, and by trace if there are several."""
    result = _summarise_traces(plan, samples, plan.traces)
    if len(plan.traces) > 1:
        result["traces"] = {
            path.stem: _summarise_traces(plan, samples, [path]) for path in plan.traces
        }
    return result


def _summarise_traces(plan: Plan, samples: Samples, traces: Iterable[Path]) -> dict[str, Any]:
    windows = [(path, seed) for path in traces for seed in range(plan.num_seeds)]
    result: dict[str, Any] = {}
    intervals: dict[str, Any] = {}
    for name in MEASURES:
        values = {
            policy: {
                kind: [getattr(samples[Cell(*w, policy, kind)], name) for w in windows]
                for kind in plan.granularities
            }
            for policy in plan.policies
        }
        result[name] = {
            policy: {kind: round(mean(found), 4) for kind, found in by_kind.items()}
            for policy, by_kind in values.items()
        }
        intervals[name] = differences(values, name in _IS_LESS_BETTER)
    result["attainment"] = {
        policy: {
            kind: _mean_attainment([samples[Cell(*w, policy, kind)].attainment for w in windows])
            for kind in plan.granularities
        }
        for policy in plan.policies
    }
    result["offline_bound_fraction"] = {
        policy: {
            kind: _mean_fraction([samples[Cell(*w, policy, kind)] for w in windows])
            for kind in plan.granularities
        }
        for policy in plan.policies
    }
    return {**result, "intervals": intervals}


def _mean_fraction(found: Sequence[Measures]) -> float | None:
    """Of the offline bound, over the windows; None where a window has none."""
    fractions = [one.offline_bound_fraction for one in found]
    known = [fraction for fraction in fractions if fraction is not None]
    return round(mean(known), 4) if len(known) == len(found) else None


def _mean_attainment(windows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By class, over the windows in which it occurs."""
    names = sorted({name for found in windows for name in found})
    return {
        name: round(mean(found[name] for found in windows if name in found), 4) for name in names
    }


Values = Mapping[str, Mapping[str, Sequence[float]]]
"""By policy and granularity, one value for each window."""


def differences(values: Values, less_is_better: bool) -> dict[str, Any]:
    """Differences of each cell to the best chunk of its policy and to fcfs/whole.

    Each as mean, low and high: a 95% interval of the mean by resampling windows. None where there
    is nothing to compare with, or one window only.
    """
    baseline = values.get("fcfs", {}).get("whole")
    result: dict[str, Any] = {}
    for policy, by_kind in values.items():
        best_chunk = _best_chunk(by_kind, less_is_better)
        result[policy] = {
            kind: {
                "best_chunk": best_chunk,
                "vs_best_chunk": best_chunk and paired_interval(found, by_kind[best_chunk]),
                "vs_fcfs_whole": baseline and paired_interval(found, baseline),
            }
            for kind, found in by_kind.items()
        }
    return result


def _best_chunk(by_kind: Mapping[str, Sequence[float]], less_is_better: bool) -> str | None:
    """Best in the mean, which favours chunks: it is chosen on the windows it is judged by."""
    chunks = [kind for kind in by_kind if kind.startswith("chunk")]
    best = min if less_is_better else max
    return best(chunks, key=lambda kind: mean(by_kind[kind]), default=None)


def paired_interval(values: Sequence[float], others: Sequence[float]) -> list[float] | None:
    """Mean difference of pairs, and the low and high end of its 95% bootstrap interval."""
    paired = np.subtract(values, others)
    if len(paired) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(paired), size=(_NUM_RESAMPLES, len(paired)))
    low, high = np.percentile(paired[draws].mean(axis=1), [2.5, 97.5])
    return [round(float(x), 4) for x in (paired.mean(), low, high)]


# ---- tables -----------------------------------------------------------------------------------


def print_tables(plan: Plan, results: Mapping[str, Any]) -> None:
    """One table per trace and measure; the difference to the best chunk where there is one."""
    from rich.console import Console

    console = Console(width=190)
    for path in plan.traces:
        found = results.get("traces", {}).get(path.stem, results)
        for name, title in MEASURES.items():
            if name in _IS_LESS_BETTER:
                title = f"{title}, load {plan.load:g}"
            console.print(_values_table(plan, found[name], f"{path.stem}: {title}"))
            if plan.num_seeds > 1:
                console.print(_differences_table(plan, found["intervals"][name]))


def _values_table(plan: Plan, values: Mapping[str, Any], title: str) -> Table:
    from rich.table import Table

    table = Table(title=title)
    table.add_column("policy")
    for kind in plan.granularities:
        table.add_column(kind, justify="right")
    for policy, by_kind in values.items():
        table.add_row(policy, *(f"{by_kind[kind]:.3f}" for kind in plan.granularities))
    return table


def _differences_table(plan: Plan, intervals: Mapping[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="difference to the policy's best chunk: mean [95% interval]", box=None)
    table.add_column("policy")
    kinds = [kind for kind in plan.granularities if not kind.startswith("chunk")]
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("best chunk", justify="right")
    for policy, by_kind in intervals.items():
        cells = [_interval_text(by_kind[kind]["vs_best_chunk"]) for kind in kinds]
        best_chunk = next(iter(by_kind.values()))["best_chunk"]
        table.add_row(policy, *cells, best_chunk or "-")
    return table


def _interval_text(interval: Sequence[float] | None) -> str:
    if interval is None:
        return "-"
    middle, low, high = interval
    return f"{middle:+.3f} [{low:+.3f}, {high:+.3f}]"
