"""When an engine process counts as wedged, and when it is restarted.

Pure: no process, no clock, no lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

GAVE_UP = "it died too often"
"""Why an engine is not restarted any more. The backend looks for it, to tell the launcher."""


@dataclass(frozen=True)
class Supervision:
    """The limits. Constants in production; tests shorten the times."""

    ping_s: float = 2.0
    """Between two questions for progress; asked only while requests are live."""
    min_wedge_s: float = 10.0
    """Without progress for so long, and for `wedge_slices` times the predicted slice: wedged."""
    wedge_slices: float = 20.0
    max_wedge_s: float = 1800.0
    """Without progress for so long: wedged, whatever was predicted."""
    min_reload_s: float = 60.0
    """An engine that restarts may load for so long, and for `reload_factor` first loads."""
    reload_factor: float = 5.0
    backoff_s: float = 1.0
    """Before the first restart; doubled with each further death in the window."""
    max_backoff_s: float = 30.0
    max_deaths: int = 5
    """So many deaths within `death_window_s` of ready engines end the restarts."""
    death_window_s: float = 300.0


class RestartPlan:
    """Back-off between restarts, and the end of them.

    Deaths age only while an engine is ready: else those of engines that take long to load, or to
    fail at it, would never be many at a time.
    """

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._ready_s = 0.0  # of all engines that died
        self._ready_since_s: float | None = None
        self._deaths_s: deque[float] = deque()  # _ready_s at each

    def note_ready(self, now_s: float) -> None:
        """An engine has loaded."""
        self._ready_since_s = now_s

    def backoff_after_death_s(self, now_s: float) -> float | None:
        """Seconds to wait before the restart; None = the engine dies too often."""
        if self._ready_since_s is not None:
            self._ready_s += now_s - self._ready_since_s
            self._ready_since_s = None
        deaths = self._deaths_s
        deaths.append(self._ready_s)
        while self._ready_s - deaths[0] > self._limits.death_window_s:
            deaths.popleft()
        if len(deaths) >= self._limits.max_deaths:
            return None
        backoff_s = self._limits.backoff_s * 2.0 ** (len(deaths) - 1)
        return min(backoff_s, self._limits.max_backoff_s)


class LoadWatch:
    """Bounds how long an engine that restarts may load, by how long the first one took."""

    def __init__(self, limits: Supervision) -> None:
        self._limits = limits
        self._begin_s = 0.0
        self.limit_s: float | None = None
        """None: the first engine, which may load for as long as it wants."""
        self.due_s: float | None = None
        """When the load that runs has taken too long; None = never, or none runs."""

    def begin(self, now_s: float) -> None:
        """An engine process was started."""
        self._begin_s = now_s
        self.due_s = None if self.limit_s is None else now_s + self.limit_s

    def end(self) -> None:
        """It is loaded, or gone."""
        self.due_s = None

    def note_first(self, now_s: float) -> None:
        """The first engine has loaded."""
        first_s = now_s - self._begin_s
        self.limit_s = max(self._limits.min_reload_s, self._limits.reload_factor * first_s)


class ProgressWatch:
    """Tells a wedged engine from a busy one. Used only while requests are live in the engine."""

    def __init__(self, limits: Supervision, max_slice_s: float) -> None:
        self._limits = limits
        self._max_slice_s = max_slice_s
        self._wedge_s = self._limit_s(0.0)
        self._progress_s = 0.0
        self._num_slices = -1
        self.next_ping_s = 0.0

    def begin(self, now_s: float) -> None:
        """The first request went in after a time without any."""
        self._progress_s = now_s
        self._wedge_s = self._limit_s(0.0)
        self.next_ping_s = now_s + self._limits.ping_s

    def on_output(self, now_s: float) -> None:
        """The thread that runs slices said something."""
        self._progress_s = now_s

    def on_pong(self, num_slices: int, slice_s: float, now_s: float) -> None:
        """num_slices: run so far; slice_s: predicted for the one that runs, 0 = none"""
        self._wedge_s = self._limit_s(slice_s)
        if num_slices != self._num_slices:
            self._num_slices = num_slices
            self._progress_s = now_s

    def on_ping_time(self, now_s: float) -> float | None:
        """Plan the next ping. Returns the seconds without progress if the engine is wedged."""
        ping_s = self._limits.ping_s
        if now_s > self.next_ping_s + ping_s:
            # we are late ourselves (stopped, or a slow callback): that says nothing of the engine
            self._progress_s = now_s
        stalled_s = now_s - self._progress_s
        if stalled_s > self._wedge_s:
            return stalled_s
        self.next_ping_s = now_s + ping_s
        return None

    def _limit_s(self, slice_s: float) -> float:
        """How long the engine may be without progress. A prediction that is no number, or beyond
        all measure, does not switch the watch off."""
        limits = self._limits
        slices_s = limits.wedge_slices * max(self._max_slice_s, slice_s)
        # max keeps its first argument beside NaN
        return min(max(limits.min_wedge_s, slices_s), limits.max_wedge_s)
