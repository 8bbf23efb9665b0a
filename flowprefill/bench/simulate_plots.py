"""`flowprefill simulate --plots DIR`: attainment against rate and against the scale of the
objectives, and TTFT by class, one picture each for every trace; --timeline: one run for Perfetto.

All cells see the same windows and the same prediction errors; bands are 95% intervals over windows.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar

from flowprefill.bench.progress import bench_progress
from flowprefill.bench.simulate_plan import Cell, Plan, take_window
from flowprefill.granularity import Granularity
from flowprefill.host_cpu import num_cpus
from flowprefill.simulator.least_work import offline_bound_on
from flowprefill.simulator.recorder import RecordedReplay
from flowprefill.simulator.replay import Replay, Setup, at_load, rate_at_load_1
from flowprefill.workload import Objective

CELLS = (
    "fcfs/whole",
    "s-edf/whole",
    "s-edf/chunk:2048",
    "s-edf/chunk:512",
    "s-edf/tile",
    "goodput/tile",
)
"""What is drawn unless the user names policies or granularities."""
_Kind = TypeVar("_Kind", bound=Replay)

LOADS = (0.1, 0.2, 0.3, 0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.3, 2.6)
SLO_SCALES = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)


@dataclass(frozen=True)
class Sweep:
    """One cell on one window."""

    by_load: tuple[float, ...]
    """Attainment at each of LOADS."""
    by_scale: tuple[float, ...]
    """Attainment at the plan's load, at each of SLO_SCALES."""
    ttft_s: dict[str, list[float]]
    """By class, at the plan's load."""


@dataclass(frozen=True)
class WindowFacts:
    """What all cells of a window share."""

    rate_at_load_1: float
    """Requests per second."""
    bound_by_load: tuple[float, ...] | None
    """The share that can be on time at most; None where the platform does not know."""
    bound_by_scale: tuple[float, ...] | None


def run(plan: Plan, is_chosen: bool, folder: Path) -> dict[str, Any]:
    """Sweep, draw three pictures per trace into `folder`, return the JSON object.

    is_chosen: the plan's policies at its granularities are drawn; else CELLS
    """
    chosen = [f"{policy}/{kind}" for policy in plan.policies for kind in plan.granularities]
    cells = chosen if is_chosen else CELLS
    sweeps, facts = sweep_all(plan, cells)
    results: dict[str, Any] = {}
    for path in plan.traces:
        by_cell = {name: [sweeps[_cell(path, s, name)] for s in _seeds(plan)] for name in cells}
        shared = [facts[path, s] for s in _seeds(plan)]
        pictures = draw(plan, path, by_cell, shared, folder)
        results[path.stem] = {**_figures(by_cell, shared), "pictures": [p.name for p in pictures]}
    return {"loads": LOADS, "slo_scales": SLO_SCALES, "traces": results}


def sweep_all(
    plan: Plan, cells: Sequence[str]
) -> tuple[dict[Cell, Sweep], dict[tuple[Path, int], WindowFacts]]:
    """Everything, on all cores; shows progress on standard error."""
    windows = [(path, seed) for path in plan.traces for seed in _seeds(plan)]
    wanted = [_cell(*window, name) for window in windows for name in cells]
    context = multiprocessing.get_context("spawn")
    num_processes = num_cpus()
    with (
        bench_progress(len(wanted)) as progress,
        ProcessPoolExecutor(num_processes, mp_context=context) as pool,
    ):
        progress.describe(f"{len(wanted)} sweeps")
        facts = [pool.submit(window_facts, plan, *window) for window in windows]
        sweeps = [pool.submit(sweep, plan, cell) for cell in wanted]
        try:
            found = {}
            for cell, future in zip(wanted, sweeps, strict=True):
                found[cell] = future.result()
                progress.advance()
            return found, {w: f.result() for w, f in zip(windows, facts, strict=True)}
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def sweep(plan: Plan, cell: Cell) -> Sweep:
    """Runs in a process of its own."""
    fixed = _replay(plan, cell, plan.load, 1.0)
    return Sweep(
        by_load=tuple(_replay(plan, cell, load, 1.0).attainment for load in LOADS),
        by_scale=tuple(_replay(plan, cell, plan.load, s).attainment for s in SLO_SCALES),
        ttft_s={k: [r.ttft_s for r in v] for k, v in fixed.records_by_class().items()},
    )


def _replay(plan: Plan, cell: Cell, load: float, slo_scale: float) -> Replay:
    return _make(Replay, plan, cell, load, slo_scale).run_all()


def _make(kind: type[_Kind], plan: Plan, cell: Cell, load: float, slo_scale: float) -> _Kind:
    """A Replay, or a kind of it, that has not run."""
    found = take_window(plan, cell.trace, cell.seed)
    granularity = Granularity.parse(cell.granularity)
    seed = plan.error_seed(cell.seed)
    setup = Setup(cell.policy, granularity, plan.error, seed, plan.platform)
    requests = at_load(found.requests, load, plan.platform)
    return kind(requests, setup, slo_scale, objectives=found.objectives)


def window_facts(plan: Plan, path: Path, seed: int) -> WindowFacts:
    """Runs in a process of its own."""
    rate = rate_at_load_1(take_window(plan, path, seed).requests, plan.platform)
    cell = Cell(path, seed, "fcfs", "whole")  # any: nothing is run

    def bound(load: float, slo_scale: float) -> float | None:
        records = _make(Replay, plan, cell, load, slo_scale).records.values()
        bound = offline_bound_on(plan.platform, [record.arrival for record in records])
        return None if bound is None else bound / len(records)

    by_load = [bound(load, 1.0) for load in LOADS]
    by_scale = [bound(plan.load, scale) for scale in SLO_SCALES]
    return WindowFacts(rate, _all_known(by_load), _all_known(by_scale))


def _all_known(shares: Sequence[float | None]) -> tuple[float, ...] | None:
    known = tuple(share for share in shares if share is not None)
    return known if len(known) == len(shares) else None


# ---- results ----------------------------------------------------------------------------------


def draw(
    plan: Plan,
    path: Path,
    by_cell: dict[str, list[Sweep]],
    facts: Sequence[WindowFacts],
    folder: Path,
) -> list[Path]:
    """Three pictures of one trace; returns their paths."""
    from flowprefill.bench.plots.attainment import Curve, rate_figure, scale_figure
    from flowprefill.bench.plots.style import save
    from flowprefill.bench.plots.ttft import class_ttfts, ttft_figure

    def bound(x: Sequence[float], shares: Sequence[tuple[float, ...] | None]) -> Curve | None:
        known = [one for one in shares if one is not None]
        return Curve("offline bound", x, _by_x(known)) if len(known) == len(shares) else None

    subject = f"{path.stem}\n{_device(plan)}"
    load_curves = [Curve(k, LOADS, _by_x([s.by_load for s in v])) for k, v in by_cell.items()]
    scale_curves = [
        Curve(k, SLO_SCALES, _by_x([s.by_scale for s in v])) for k, v in by_cell.items()
    ]
    figures = {
        "rate": rate_figure(
            load_curves,
            title=subject,
            rate_at_load_1=mean(one.rate_at_load_1 for one in facts),
            bound=bound(LOADS, [one.bound_by_load for one in facts]),
        ),
        "slo_scale": scale_figure(
            scale_curves,
            title=f"{subject}, load {plan.load:g}",
            bound=bound(SLO_SCALES, [one.bound_by_scale for one in facts]),
        ),
        "ttft": ttft_figure(
            class_ttfts(_objectives(plan, path), {k: _all_ttfts(v) for k, v in by_cell.items()}),
            title=f"{subject}, load {plan.load:g}",
        ),
    }
    paths = [folder / f"{path.stem}_{name}.png" for name in figures]
    for figure, picture in zip(figures.values(), paths, strict=True):
        save(figure, picture)
    return paths


def _by_x(windows: Sequence[Sequence[float]]) -> list[list[float]]:
    """By x and window, from by window and x."""
    return [list(values) for values in zip(*windows, strict=True)]


def _objectives(plan: Plan, path: Path) -> list[Objective]:
    """Of the requests of all windows."""
    return [goal for seed in _seeds(plan) for goal in take_window(plan, path, seed).objectives]


def _all_ttfts(sweeps: Sequence[Sweep]) -> dict[str, list[float]]:
    """By class, of all windows together."""
    names = {name for sweep in sweeps for name in sweep.ttft_s}
    return {name: [s for sweep in sweeps for s in sweep.ttft_s.get(name, [])] for name in names}


def _figures(by_cell: dict[str, list[Sweep]], facts: Sequence[WindowFacts]) -> dict[str, Any]:
    """Means over the windows, for the JSON line."""

    def means(windows: Sequence[Sequence[float] | None]) -> list[float] | None:
        known = [one for one in windows if one is not None]
        if len(known) < len(windows):
            return None
        return [round(mean(values), 4) for values in _by_x(known)]

    return {
        "rate_at_load_1": round(mean(one.rate_at_load_1 for one in facts), 3),
        "attainment_by_load": {k: means([s.by_load for s in v]) for k, v in by_cell.items()},
        "attainment_by_slo_scale": {k: means([s.by_scale for s in v]) for k, v in by_cell.items()},
        "offline_bound_by_load": means([one.bound_by_load for one in facts]),
        "offline_bound_by_slo_scale": means([one.bound_by_scale for one in facts]),
    }


def _device(plan: Plan) -> str:
    platform = plan.platform
    return f"{platform.model_name} on {platform.device_name}, simulated"


def _seeds(plan: Plan) -> range:
    return range(plan.num_seeds)


def _cell(path: Path, seed: int, name: str) -> Cell:
    policy, _, granularity = name.partition("/")
    return Cell(path, seed, policy, granularity)


# ---- one run ----------------------------------------------------------------------------------


def write_timeline(plan: Plan, slo_scale: float, path: Path) -> None:
    """Run the plan's first cell on the first window once more, and write what ran when."""
    from flowprefill.bench.plots.chrome_trace import write_chrome_trace

    cell = Cell(plan.traces[0], 0, plan.policies[0], plan.granularities[0])
    replay = _make(RecordedReplay, plan, cell, plan.load, slo_scale)
    replay.run_all()
    facts = {
        "trace": cell.trace.stem,
        "policy": cell.policy,
        "granularity": cell.granularity,
        "load": plan.load,
        "slo_scale": slo_scale,
        "device": _device(plan),
    }
    write_chrome_trace(path, replay.runs, replay.request_spans(), facts)
