"""Distribution of TTFT by SLO class: one panel per class, one line per cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from flowprefill.bench.plots.style import cell_styles, log_axis, new_figure

MIN_TTFT_S = 1e-4
"""What is quicker is drawn there: the axis is logarithmic."""
_NUM_COLUMNS = 2


@dataclass(frozen=True)
class ClassTtfts:
    """One SLO class."""

    name: str
    objective_s: float | None
    """None: not the same for all of its requests."""
    ttft_s: Mapping[str, Sequence[float]]
    """By cell, one for each request; infinite if it got no token."""


def ttft_figure(classes: Sequence[ClassTtfts], *, title: str) -> Figure:
    """Share of the requests whose first token came within a time; objectives as upright lines."""
    num_rows = math.ceil(len(classes) / _NUM_COLUMNS)
    figure = new_figure((8.0, 1.2 + 2.4 * num_rows))
    grid = figure.subplots(num_rows, min(len(classes), _NUM_COLUMNS), sharey=True, squeeze=False)
    panels = list(grid.flat)
    styles = cell_styles(list(classes[0].ttft_s))
    for axes, one in zip(panels, classes, strict=False):
        _draw(axes, one, {name: {**style, "marker": ""} for name, style in styles.items()})
    for axes in panels[len(classes) :]:
        axes.set_visible(False)
    figure.supxlabel("time to first token, seconds", fontsize=10)
    figure.supylabel("requests", fontsize=10)
    figure.suptitle(title, fontsize=11)
    handles, labels = _handles(panels[: len(classes)])
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    return figure


def _draw(axes: Axes, one: ClassTtfts, styles: Mapping[str, dict[str, Any]]) -> None:
    for name, values in one.ttft_s.items():
        finite = np.sort([v for v in values if v < math.inf])
        shares = np.arange(1, len(finite) + 1) / len(values)
        axes.step(np.maximum(finite, MIN_TTFT_S), shares, where="post", label=name, **styles[name])
    goal = f"objective {one.objective_s:g} s" if one.objective_s else "objective by length"
    if one.objective_s:
        axes.axvline(one.objective_s, color="black", linewidth=1, label="objective")
    axes.set_xscale("log")
    log_axis(axes.xaxis)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(alpha=0.25)
    num_requests = len(next(iter(one.ttft_s.values())))
    axes.set_title(f"{one.name}: {num_requests} requests, {goal}", fontsize=9)


def _handles(panels: Sequence[Axes]) -> tuple[list[Artist], list[str]]:
    """Of all panels, each label once."""
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    return list(found.values()), list(found)
