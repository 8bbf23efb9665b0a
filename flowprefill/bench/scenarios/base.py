"""A scenario of `flowprefill bench scenarios`, and what came of it.

A scenario is one function; its file is its kind. It gets a Rig, does on a real server or engine
what burnt somebody, and returns its bars.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowprefill.bench.bars import Bar

if TYPE_CHECKING:
    from flowprefill.bench.scenarios.rig import Rig


@dataclass(frozen=True)
class Scenario:
    """One row of the list, as a function."""

    name: str
    row: int
    """Its number in the list of scenarios; tests/scenarios has the same numbers."""
    thread: str
    """The public report of the symptom, as owner/project#number."""
    measure: Callable[[Rig], Sequence[Bar]]
    """Raises BenchmarkError or ServerError where nothing could be measured."""


@dataclass
class Result:
    """What came of one scenario."""

    scenario: Scenario
    bars: list[Bar] = field(default_factory=list)
    error: str | None = None
    """Why there are no bars."""

    @property
    def is_met(self) -> bool:
        return self.error is None and all(bar.is_met for bar in self.bars)

    def to_json(self) -> dict[str, Any]:
        return {
            "row": self.scenario.row,
            "is_met": self.is_met,
            "error": self.error,
            "bars": [bar.to_json() for bar in self.bars],
        }
