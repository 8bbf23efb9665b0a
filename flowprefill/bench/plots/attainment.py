"""Attainment against the load, or against the scale of the objectives, one line per cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from flowprefill.bench.plots.style import (
    cell_styles,
    legend_below,
    legend_beside,
    log_axis,
    new_figure,
)

_NUM_RESAMPLES = 2000
_LOAD_LABEL = "offered load, prefill seconds per second"
_SHARE_LABEL = "requests with TTFT objective met"
_WIDE_RANGE = 5.0
"""Of scales, from which on powers of two are ticks enough."""


@dataclass(frozen=True)
class Curve:
    """Attainment of one cell, or a bound on it."""

    name: str
    """policy/granularity, or what the bound is called."""
    x: Sequence[float]
    """Ascending."""
    attainment: Sequence[Sequence[float]]
    """At each x, the share on time in each window; the same windows everywhere."""


def rate_figure(
    curves: Sequence[Curve],
    *,
    title: str,
    rate_at_load_1: float,
    bound: Curve | None = None,
    target: float = 0.9,
) -> Figure:
    """Attainment against load, with requests per second along the top.

    rate_at_load_1: requests per second that offer a load of 1
    bound: what no schedule can exceed
    """
    figure = new_figure()
    axes = figure.subplots()
    _draw(axes, curves, _styles(curves), bound, target)
    axes.set_xlabel(f"{_LOAD_LABEL} (1 = device just busy)")
    axes.set_xlim(left=0)
    _add_rate_axis(axes, rate_at_load_1)
    _finish(axes, curves)
    axes.set_ylabel(_SHARE_LABEL)
    axes.set_title(title, fontsize=10)
    legend_beside(figure, axes)
    return figure


def rate_panels(
    panels: Mapping[str, Sequence[Curve]],
    *,
    title: str,
    rate_at_load_1: float,
    bound: Curve | None = None,
    target: float = 0.9,
) -> Figure:
    """The same with a panel for each of several groups of curves; those of one name look alike."""
    figure = new_figure((1.5 + 3.0 * max(len(panels), 2), 4.5))
    row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    everything = [curve for curves in panels.values() for curve in curves]
    styles = _styles(everything)
    for axes, (name, curves) in zip(row, panels.items(), strict=True):
        _draw(axes, curves, styles, bound, target)
        axes.set_xlim(left=0)
        axes.set_xlabel(_LOAD_LABEL, fontsize=9)
        _add_rate_axis(axes, rate_at_load_1)
        _finish(axes, everything)
        axes.set_title(name, fontsize=10)
    row[0].set_ylabel(_SHARE_LABEL)
    figure.suptitle(title, fontsize=10)
    legend_below(figure, row, first=list(styles))
    return figure


def scale_figure(
    curves: Sequence[Curve], *, title: str, bound: Curve | None = None, target: float = 0.9
) -> Figure:
    """Attainment against a factor on all objectives; below 1 they are tighter."""
    figure = new_figure()
    axes = figure.subplots()
    _draw(axes, curves, _styles(curves), bound, target)
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    if high < _WIDE_RANGE * low:
        log_axis(axes.xaxis, subs=range(1, 10))
    else:
        log_axis(axes.xaxis, base=2)
    axes.set_xlabel("scale of all TTFT objectives (below 1: tighter)")
    _finish(axes, curves)
    axes.set_ylabel(_SHARE_LABEL)
    axes.set_title(title, fontsize=10)
    legend_beside(figure, axes)
    return figure


def interval(values: Sequence[Sequence[float]]) -> tuple[npt.NDArray[np.float64], ...]:
    """Mean over the windows, low and high end of its 95% interval, at each x.

    From resampled windows, the same samples at each x; equal to the mean for one window.
    """
    table = np.asarray(values, float)  # [x, windows]
    num_windows = table.shape[1]
    picks = np.random.default_rng(0).integers(num_windows, size=(_NUM_RESAMPLES, num_windows))
    means = table[:, picks].mean(axis=2)  # [x, samples]
    low, high = np.quantile(means, (0.025, 0.975), axis=1)
    return table.mean(axis=1), low, high


def _styles(curves: Sequence[Curve]) -> Mapping[str, dict[str, Any]]:
    return cell_styles(list(dict.fromkeys(curve.name for curve in curves)))


def _draw(
    axes: Axes,
    curves: Sequence[Curve],
    styles: Mapping[str, dict[str, Any]],
    bound: Curve | None,
    target: float,
) -> None:
    for curve in curves:
        middle, low, high = interval(curve.attainment)
        style = styles[curve.name]
        axes.plot(curve.x, middle, label=curve.name, **style)
        axes.fill_between(curve.x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if bound is not None:
        middle, _, _ = interval(bound.attainment)
        axes.plot(bound.x, middle, color="black", linestyle=":", linewidth=2, label=bound.name)
    axes.axhline(target, color="grey", linewidth=0.8, label=f"target {target:.0%}")


def _add_rate_axis(axes: Axes, rate_at_load_1: float) -> None:
    """Requests per second along the top."""
    top = axes.secondary_xaxis(
        "top",
        functions=(
            lambda load: np.asarray(load) * rate_at_load_1,
            lambda rate: np.asarray(rate) / rate_at_load_1,
        ),
    )
    top.set_xlabel("arrival rate, requests per second", fontsize=axes.xaxis.label.get_fontsize())


def _finish(axes: Axes, curves: Sequence[Curve]) -> None:
    """curves: which the axes of shares must have room for"""
    lowest = min(float(interval(curve.attainment)[1].min()) for curve in curves)
    axes.set_ylim(max(0.0, math.floor(10 * lowest - 0.5) / 10), 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0))
    axes.grid(alpha=0.25)
