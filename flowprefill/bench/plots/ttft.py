"""Distribution of TTFT by SLO class: one panel per class, one line per cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from flowprefill.bench.plots.style import cell_styles, legend_below, log_axis, new_figure
from flowprefill.workload import Objective

MIN_TTFT_S = 1e-4
"""What is quicker is drawn there: the axis is logarithmic."""
_NUM_COLUMNS = 2
_MAX_RANGE = 5e3
"""Of times on one axis, up to which there is room for two ticks per decade."""


@dataclass(frozen=True)
class ClassTtfts:
    """One SLO class."""

    name: str
    objective_s: float | None
    """None: not the same for all of its requests."""
    ttft_s: Mapping[str, Sequence[float]]
    """By cell, one for each request; infinite if it got no token."""


def class_ttfts(
    objectives: Iterable[Objective], ttft_s: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[ClassTtfts]:
    """Classes of requests, that with the tightest objective first.

    objectives: of all requests; ttft_s: by cell and class
    """
    goals: dict[str, set[float]] = {}
    for goal in objectives:
        goals.setdefault(goal.name, set()).add(goal.ttft_s)
    return [
        ClassTtfts(
            name,
            next(iter(goals[name])) if len(goals[name]) == 1 else None,
            {cell: by_class.get(name, ()) for cell, by_class in ttft_s.items()},
        )
        for name in sorted(goals, key=lambda name: min(goals[name]))
    ]


def ttft_figure(classes: Sequence[ClassTtfts], *, title: str) -> Figure:
    """Share of the requests whose first token came within a time; objectives as upright lines."""
    num_rows = math.ceil(len(classes) / _NUM_COLUMNS)
    figure = new_figure((8.0, 1.5 + 2.2 * num_rows))
    num_columns = min(len(classes), _NUM_COLUMNS)
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    panels = list(grid.flat)
    styles = cell_styles(list(classes[0].ttft_s))
    for axes, one in zip(panels, classes, strict=False):
        _draw(axes, one, {name: {**style, "marker": ""} for name, style in styles.items()})
    low, high = panels[0].get_xlim()
    log_axis(panels[0].xaxis, subs=(1.0, 3.0) if high < _MAX_RANGE * low else (1.0,))  # shared
    for axes in panels[len(classes) :]:
        axes.set_visible(False)
    for axes in panels[: len(classes)][-num_columns:]:
        axes.set_xlabel("time to first token, seconds")
    figure.supylabel("share of the requests", fontsize=10)
    figure.suptitle(title, fontsize=10)
    legend_below(figure, panels[: len(classes)])
    return figure


def _draw(axes: Axes, one: ClassTtfts, styles: Mapping[str, dict[str, Any]]) -> None:
    for name, values in one.ttft_s.items():
        finite = np.sort([v for v in values if v < math.inf])
        shares = np.arange(1, len(finite) + 1) / len(values)
        axes.step(np.maximum(finite, MIN_TTFT_S), shares, where="post", label=name, **styles[name])
    goal = f"objective {one.objective_s:.3g} s" if one.objective_s else "objective by length"
    if one.objective_s:
        axes.axvline(one.objective_s, color="black", linewidth=1, label="objective")
    axes.set_xscale("log")
    axes.tick_params(labelbottom=True)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(alpha=0.25)
    num_requests = len(next(iter(one.ttft_s.values())))
    axes.set_title(f"{one.name}: {num_requests} requests, {goal}", fontsize=9)
