"""Record: what came of all requests of a soak, by kind, and the first things that went wrong."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

ANSWERED, LEFT, REFUSED, LOST = "answered", "left", "refused", "lost"
OUTCOMES = (ANSWERED, LEFT, REFUSED, LOST)
_MAX_PROBLEMS = 20
_MISSED_S = 0.5
_NOTICED_S = 2.0
"""Within which a departure has surely been noticed."""


@dataclass
class Record:
    """What came of all requests so far."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(Kind, outcome) -> requests."""
    kill_times_s: list[float] = field(default_factory=list)
    departures_s: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of requests that were cancelled in the middle of their answer."""
    num_hung: int = 0
    num_changed: int = 0
    """Controls with other bytes than at first."""
    num_wrong: int = 0
    """Failed though no engine was killed, not what was asked for, or answered though bad."""
    num_without_engine: int = 0
    """Kills of an engine that was not there, was not missed, or had no successor in time."""
    problems: list[str] = field(default_factory=list)
    """The first of these, in words."""
    slowest_s: float = 0.0

    @property
    def num_surely_cancelled(self) -> int:
        """Departures that the server must have counted: no engine's end can have been first."""
        return sum(
            not any(b - _MISSED_S < kill_s < e + _NOTICED_S for kill_s in self.kill_times_s)
            for b, e in self.departures_s
        )

    def note(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem[:300])

    def note_wrong(self, problem: str) -> None:
        self.num_wrong += 1
        self.note(problem)

    def was_killed_since(self, begin_s: float) -> bool:
        """A request may also have come to an engine that was dead and not yet missed."""
        return any(kill_s > begin_s - _MISSED_S for kill_s in self.kill_times_s)
