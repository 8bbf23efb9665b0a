"""When an engine process counts as wedged, when it is restarted, and what waits to be sent to it.

Pure: no process, no clock, no lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

GAVE_UP = "it died too often"
"""Why an engine is not restarted any more. The launcher looks for it in the log."""


@dataclass(frozen=True)
class Supervision:
    """The limits. Constants in production; tests shorten the times."""

    ping_s: float = 2.0
    """Between two questions for progress; asked only while requests are live."""
    min_wedge_s: float = 10.0
    """Without progress for so long, and for `wedge_slices` longest slices: wedged."""
    wedge_slices: float = 20.0
    backoff_s: float = 1.0
    """Before the first restart; doubled with each further death in the window."""
    max_backoff_s: float = 30.0
    max_deaths: int = 5
    """So many deaths within `death_window_s` end the restarts."""
    death_window_s: float = 300.0


class RestartPlan:
    """Back-off between restarts, and the end of them."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._death_times_s: deque[float] = deque()

    def backoff_after_death_s(self, now_s: float) -> float | None:
        """Seconds to wait before the restart; None = the engine dies too often."""
        deaths = self._death_times_s
        deaths.append(now_s)
        while now_s - deaths[0] > self._limits.death_window_s:
            deaths.popleft()
        if len(deaths) >= self._limits.max_deaths:
            return None
        backoff_s = self._limits.backoff_s * 2.0 ** (len(deaths) - 1)
        return min(backoff_s, self._limits.max_backoff_s)


class ProgressWatch:
    """Tells a wedged engine from a busy one. Used only while requests are live in the engine."""

    def __init__(self, limits: Supervision, max_slice_s: float) -> None:
        self._ping_s = limits.ping_s
        self._wedge_s = max(limits.min_wedge_s, limits.wedge_slices * max_slice_s)
        self._progress_s = 0.0
        self._num_slices = -1
        self.next_ping_s = 0.0

    def begin(self, now_s: float) -> None:
        """The first request went in after a time without any."""
        self._progress_s = now_s
        self.next_ping_s = now_s + self._ping_s

    def on_output(self, now_s: float) -> None:
        self._progress_s = now_s

    def on_pong(self, num_slices: int, now_s: float) -> None:
        if num_slices != self._num_slices:
            self._num_slices = num_slices
            self._progress_s = now_s

    def on_ping_time(self, now_s: float) -> float | None:
        """Plan the next ping. Returns the seconds without progress if the engine is wedged."""
        if now_s > self.next_ping_s + self._ping_s:
            # we are late ourselves (stopped, or a slow callback): that says nothing of the engine
            self._progress_s = now_s
        stalled_s = now_s - self._progress_s
        if stalled_s > self._wedge_s:
            return stalled_s
        self.next_ping_s = now_s + self._ping_s
        return None


T = TypeVar("T")


class HeldRequests(Generic[T]):
    """Requests that wait to be sent to the engine, in the order in which they came."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[T, float]] = {}  # what is sent, when it expires
        self._cancelled: set[int] = set()

    def __contains__(self, req_id: int) -> bool:
        return req_id in self._held

    def add(self, req_id: int, message: T, expires_s: float) -> None:
        """Keep what is to be sent of a request until `expires_s` at most."""
        self._held[req_id] = (message, expires_s)

    def cancel(self, req_id: int) -> None:
        """Mark a request that is held as over."""
        self._cancelled.add(req_id)

    def next_due_s(self) -> float | None:
        """When the first one expires."""
        return min((expires_s for _, expires_s in self._held.values()), default=None)

    def take_ended(self, now_s: float) -> dict[int, bool]:
        """Remove those that are over: req_id -> True if cancelled, False if it waited too long."""
        ended = {
            req_id: req_id in self._cancelled
            for req_id, (_, expires_s) in self._held.items()
            if req_id in self._cancelled or now_s >= expires_s
        }
        for req_id in ended:
            del self._held[req_id]
        self._cancelled.clear()
        return ended

    def take_first(self, may_go: Callable[[T], bool]) -> T | None:
        """Remove the first one that may be sent."""
        for req_id, (message, _) in self._held.items():
            if req_id not in self._cancelled and may_go(message):
                del self._held[req_id]
                return message
        return None
