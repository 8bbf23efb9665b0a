"""SpeedFactor: how fast the device is now, against the profile. Pure.

The weighted median over the last stretches of measured over profiled seconds. A stretch weighs what
it was predicted to last, a tenth less with each that follows, and at most a third of all: long ones
count more than short ones, new ones more than old ones, and no single one, however wrong, decides.
Queueing must never enter a sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from itertools import accumulate

BOUNDS = (0.25, 4.0)
WINDOW = 32
"""Stretches that are looked back on. After a lasting change of speed seven of equal length turn the
majority, and after so many nothing is left of the time before."""
_KEPT = 0.9
_MIN_STRETCHES = 3
"""A majority against an outlier; before, the profile is believed."""


class SpeedFactor:
    """Measured over profiled seconds of the device."""

    def __init__(self) -> None:
        self._stretches: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self.value = 1.0

    def observe(self, busy_s: float, profiled_s: float) -> None:
        """Take in a stretch of slices: measured seconds, and those of the profile (factor 1)."""
        if not (profiled_s > 0 and math.isfinite(profiled_s) and math.isfinite(busy_s)):
            return
        self._stretches.append((busy_s / profiled_s, profiled_s))
        if len(self._stretches) >= _MIN_STRETCHES:
            low, high = BOUNDS
            self.value = min(max(self._weighted_median(), low), high)

    def _weighted_median(self) -> float:
        age = len(self._stretches)
        weighted = []
        for ratio, seconds in self._stretches:
            age -= 1
            weighted.append((ratio, seconds * _KEPT**age))
        *others, second, _ = sorted(weight for _, weight in weighted)
        # The largest cap of which three fit into the sum of the capped weights.
        cap = min((sum(others) + second) / 2, sum(others))
        weighted.sort()
        sums = list(accumulate(min(weight, cap) for _, weight in weighted))
        return weighted[bisect_left(sums, sums[-1] / 2)][0]
