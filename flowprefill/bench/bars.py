"""Bars: figures, each held to what it may be; and the one table that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Bar:
    """One figure, and what it may be at most, or at least."""

    what: str
    measured: float
    limit: float | None
    """None: the figure is only reported."""
    unit: str = "s"
    is_floor: bool = False
    """The figure may not be less than the limit, where others may not be more."""

    @property
    def is_met(self) -> bool:
        if self.limit is None:
            return True
        return self.measured >= self.limit if self.is_floor else self.measured <= self.limit

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "measured": round(self.measured, 4),
            "limit": None if self.limit is None else round(self.limit, 4),
            "is_floor": self.is_floor,
            "unit": self.unit,
            "is_met": self.is_met,
        }


def bar_table(title: str, head: Sequence[str] = ()) -> Table:
    """An empty table of bars; head: columns before theirs."""
    from rich.table import Table

    table = Table(*head, "what", title=title)
    for heading in ("measured", "bar", "met"):
        table.add_column(heading, justify="right")
    return table


def add_bars(table: Table, bars: Iterable[Bar], head: Sequence[str] = ()) -> None:
    """One row per bar, a section of them; head: cells of the first row before its bar's."""
    cells = head
    for bar in bars:
        table.add_row(*cells, *_cells(bar))
        cells = [""] * len(head)
    table.add_section()


def _cells(bar: Bar) -> tuple[str, str, str, str]:
    limit, met = "", ""
    if bar.limit is not None:
        limit = f"{'>=' if bar.is_floor else '<='} {_figure(bar.limit, bar.unit)}"
        met = "yes" if bar.is_met else "no"
    return bar.what, _figure(bar.measured, bar.unit), limit, met


def _figure(value: float, unit: str) -> str:
    """Times to the millisecond, counts as they are."""
    text = f"{value:.3f}" if unit == "s" else f"{value:.4g}"
    return f"{text} {unit}".rstrip()
