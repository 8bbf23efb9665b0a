"""Clocks. The scheduler never reads one: the engine and the simulator pass `now_s` in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now_s(self) -> float:
        """Seconds since an arbitrary, fixed origin."""
        ...


class MonotonicClock:
    """CLOCK_MONOTONIC: the same origin in every process of one machine."""

    def now_s(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that is moved by hand, for the simulator and tests."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, now_s: float) -> None:
        """Move to `now_s`; time never goes back."""
        if now_s < self._now_s:
            raise ValueError(f"clock moved back: {now_s} < {self._now_s}")
        self._now_s = now_s
