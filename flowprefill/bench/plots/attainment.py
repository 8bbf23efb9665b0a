"""Attainment against the load, or against the scale of the objectives, one line per cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from flowprefill.bench.plots.style import cell_styles, legend_beside, log_axis, new_figure

_NUM_RESAMPLES = 2000


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
    _draw(axes, curves, bound, target)
    axes.set_xlabel("offered load, prefill seconds per second (1 = device just busy)")
    axes.set_xlim(left=0)
    top = axes.secondary_xaxis(
        "top",
        functions=(
            lambda load: np.asarray(load) * rate_at_load_1,
            lambda rate: np.asarray(rate) / rate_at_load_1,
        ),
    )
    top.set_xlabel("arrival rate, requests per second")
    _finish(figure, axes, title)
    return figure


def scale_figure(
    curves: Sequence[Curve], *, title: str, bound: Curve | None = None, target: float = 0.9
) -> Figure:
    """Attainment against a factor on all objectives; below 1 they are tighter."""
    figure = new_figure()
    axes = figure.subplots()
    _draw(axes, curves, bound, target)
    axes.set_xscale("log")
    log_axis(axes.xaxis, base=2)
    axes.set_xlabel("scale of all TTFT objectives (below 1: tighter)")
    _finish(figure, axes, title)
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


def _draw(axes: Axes, curves: Sequence[Curve], bound: Curve | None, target: float) -> None:
    styles = cell_styles([curve.name for curve in curves])
    for curve in curves:
        middle, low, high = interval(curve.attainment)
        style = styles[curve.name]
        axes.plot(curve.x, middle, label=curve.name, **style)
        axes.fill_between(curve.x, low, high, color=style["color"], alpha=0.15, linewidth=0)
    if bound is not None:
        middle, _, _ = interval(bound.attainment)
        axes.plot(bound.x, middle, color="black", linestyle=":", linewidth=2, label=bound.name)
    axes.axhline(target, color="grey", linewidth=0.8, label=f"target {target:.0%}")


def _finish(figure: Figure, axes: Axes, title: str) -> None:
    axes.set_ylabel("requests with TTFT objective met")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.grid(alpha=0.25)
    axes.set_title(title, fontsize=10)
    legend_beside(figure, axes)
