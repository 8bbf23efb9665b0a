"""How all figures look: size, colours, one style per cell, legends beside the axes.

Figures are made without pyplot: nothing global, no display.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

SIZE = (8.0, 4.5)
"""Inches; readable at 800 pixels."""
DPI = 110
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
"""Okabe and Ito: told apart with any colour vision."""
MARKERS = "osD^vPX*"
DASHES = ("-", (0, (5, 2)), (0, (5, 1, 1, 1)))


def new_figure(size: tuple[float, float] = SIZE) -> Figure:
    """An empty figure; axes are placed so that no text is cut off."""
    return Figure(figsize=size, layout="constrained")


def cell_styles(names: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """Line styles by cell: another colour and marker for each, so that they differ in grey too;
    neighbours have other dashes, those with gaps above, so that a line shows below another one."""
    return {
        name: {
            "color": PALETTE[index % len(PALETTE)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": DASHES[index % len(DASHES)],
            "markersize": 4,
            "linewidth": 1.5,
            "zorder": 2 + 0.1 * (index % len(DASHES)),
        }
        for index, name in enumerate(names)
    }


def legend_beside(figure: Figure, axes: Axes) -> None:
    """The legend right of the axes, where it covers nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, handlelength=3.5)


def legend_below(figure: Figure, panels: Sequence[Axes], first: Sequence[str] = ()) -> None:
    """One legend of all panels, each label once; `first`: those that come before all others."""
    found: dict[str, Artist] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    labels = list(dict.fromkeys([*first, *found]))
    handles = [found[label] for label in labels]
    columns = min(len(labels), 4)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.5)


def log_axis(axis: Any, base: float = 10.0, subs: Sequence[float] = (1.0,)) -> None:
    """Ticks at these multiples of the powers of `base`, written as plain numbers."""
    axis.set_major_locator(LogLocator(base=base, subs=subs, numticks=20))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    """Write it; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
