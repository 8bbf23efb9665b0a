"""Interrupt: why a pass that runs is left at its next boundary - something happened, or it is time.

Any thread raises it. It lies in memory that native kernels look at between two slices too.
"""

from __future__ import annotations

import ctypes
import math

from flowprefill.clock import Clock


class _Shared(ctypes.Structure):
    """native/src/slices.h, Interrupt."""

    _fields_ = (
        ("is_raised", ctypes.c_uint32),
        ("leave_s", ctypes.c_double),
        ("num_more", ctypes.c_uint64),
    )


class Interrupt:
    """One engine's. Its times are those of one thread, which also runs the passes."""

    def __init__(self, clock: Clock) -> None:
        """clock: where native kernels look at it, CLOCK_MONOTONIC; with another one they may leave
        too early or a little late, and the executor puts that right."""
        self._clock = clock
        self._shared = _Shared(0, math.inf, 0)
        self.address = ctypes.addressof(self._shared)
        self.timer_s = math.inf
        """When it is due by itself."""

    def raise_now(self) -> None:
        """Due until it is cleared. From any thread."""
        self._shared.is_raised = 1

    def clear(self) -> None:
        """No longer raised."""
        self._shared.is_raised = 0

    @property
    def is_raised(self) -> bool:
        return bool(self._shared.is_raised)

    @property
    def num_more_slices(self) -> int:
        """Slices that native kernels began behind the first one of a call; readable meanwhile."""
        return int(self._shared.num_more)

    def is_due(self) -> bool:
        """Whether it is raised or its timer has run out."""
        return self.is_raised or self._clock.now_s() >= self.timer_s

    def begin_stretch(self, until_s: float = math.inf) -> None:
        """A pass begins or goes on, until that time at the latest."""
        self._shared.leave_s = min(self.timer_s, until_s)

    def must_leave(self) -> bool:
        """Whether that pass must be left at a boundary."""
        return self.is_raised or self._clock.now_s() >= self._shared.leave_s
