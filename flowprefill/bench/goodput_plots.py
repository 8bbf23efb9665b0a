"""`flowprefill bench goodput --plots DIR`: attainment against rate and against the scale of the
objectives, and TTFT by class, as measured on the engine; --timeline: one run for Perfetto.

Bands are 95% intervals over blocks of the replay. Cells were measured at loads of their own, each
near where it fails, so each line has its own points; TTFTs are of one load that all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowprefill.bench.compared import BASELINE
from flowprefill.bench.goodput import SCALE_LOAD, TIMELINE_CELL, TIMELINE_REQUESTS
from flowprefill.bench.goodput_outcomes import TARGET, CellResult, Outcome, ttft_by_class
from flowprefill.bench.goodput_plan import GoodputPlan, common_chunk
from flowprefill.bench.goodput_runs import Cell, GoodputRuns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from flowprefill.bench.plots.attainment import Curve

Results = Mapping[Cell, CellResult]


def shown_cells(plan: GoodputPlan) -> list[Cell]:
    """Cells whose TTFTs are drawn; all if the user chose none of the usual ones."""
    names = (BASELINE, f"s-edf/{common_chunk(plan.length_scale)}", "s-edf/tile", "goodput/tile")
    return [cell for cell in plan.guesses if cell.name in names] or list(plan.guesses)


def draw(plan: GoodputPlan, results: Results, subject: str, folder: Path, stem: str) -> list[Path]:
    """Save two or three pictures, their names beginning with `stem`; returns their paths."""
    from flowprefill.bench.plots.style import save

    found = []
    for name, figure in figures(plan, results, subject).items():
        found.append(folder / f"{stem}_engine_{name}.png")
        save(figure, found[-1])
    return found


def figures(plan: GoodputPlan, results: Results, subject: str) -> dict[str, Figure]:
    """By name. subject: what all of them are of; "slo_scale" is there if it was measured."""
    from flowprefill.bench.plots.attainment import rate_panels, scale_figure
    from flowprefill.bench.plots.ttft import class_ttfts, ttft_figure

    by_load = {cell: _curve(cell.name, result.by_load) for cell, result in results.items()}
    found = {
        "rate": rate_panels(
            _by_policy(by_load),
            title=subject,
            rate_at_load_1=plan.rate_at_load_1,
            bound=_bound(plan, by_load.values(), lambda load: (load, 1.0)),
            target=TARGET,
        )
    }
    by_scale = [
        _curve(cell.name, {1 / tightness: o for tightness, o in result.by_tightness.items()})
        for cell, result in results.items()
        if result.by_tightness
    ]
    at_load = f"{subject}, load {SCALE_LOAD:g}"
    if by_scale:
        found["slo_scale"] = scale_figure(
            by_scale,
            title=at_load,
            bound=_bound(plan, by_scale, lambda scale: (SCALE_LOAD, scale)),
            target=TARGET,
        )
    ttft_s = {
        cell.name: ttft_by_class(results[cell].by_load[SCALE_LOAD]) for cell in shown_cells(plan)
    }
    found["ttft"] = ttft_figure(class_ttfts(plan.window.objectives, ttft_s), title=at_load)
    return found


def _by_policy(curves: Mapping[Cell, Curve]) -> dict[str, list[Curve]]:
    """A group for each policy, its curves named by granularity; in each the baseline too, which has
    none of its own unless it is alone."""
    baseline = Cell.parse(BASELINE)
    others = [cell for cell in curves if cell != baseline] or list(curves)
    groups: dict[str, list[Curve]] = {}
    for cell in others:
        start = [curves[baseline]] if baseline in curves and baseline not in others else []
        group = groups.setdefault(cell.policy, start)
        group.append(replace(curves[cell], name=cell.granularity))
    return groups


def _curve(name: str, by_x: Mapping[float, Sequence[Outcome]]) -> Curve:
    from flowprefill.bench.plots.attainment import Curve

    x = sorted(by_x)
    return Curve(name, x, [[o.num_on_time / o.num_requests for o in by_x[v]] for v in x])


def _bound(
    plan: GoodputPlan, curves: Iterable[Curve], place: Callable[[float], tuple[float, float]]
) -> Curve | None:
    """Wherever something was measured; None where the platform does not know.

    place: load and scale of the objectives, by x
    """
    from flowprefill.bench.plots.attainment import Curve

    x = sorted({value for curve in curves for value in curve.x})
    bounds = [plan.offline_bound(*place(value)) for value in x]
    num_requests = len(plan.window.requests)
    shares = [[bound / num_requests] for bound in bounds if bound is not None]
    return Curve("offline bound", x, shares) if len(shares) == len(x) else None


def write_timeline(
    runs: GoodputRuns, plan: GoodputPlan, facts: Mapping[str, Any], path: Path
) -> None:
    """Run the first requests once more on one cell, and write what the device did when."""
    from flowprefill.bench.plots.chrome_trace import write_chrome_trace

    usual = Cell.parse(TIMELINE_CELL)
    cell = usual if usual in plan.guesses else next(iter(plan.guesses))
    recorded = runs.record(cell, SCALE_LOAD, TIMELINE_REQUESTS)
    names = {"policy": cell.policy, "granularity": cell.granularity, "load": SCALE_LOAD}
    write_chrome_trace(path, recorded.runs, recorded.spans, {**facts, **names})
