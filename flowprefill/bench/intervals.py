"""How sure a median is. Pure functions of the values measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_CONFIDENCE = 0.95


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """A 95% interval of the median, from two of the values; None for fewer than six.

    Free of assumptions about their distribution: each value is below the true median with
    probability one half, so how many are is binomial.
    """
    ordered = sorted(values)
    num_cut = 0  # values left out at each end
    while _share_below(num_cut, len(ordered)) <= (1 - _CONFIDENCE) / 2:
        num_cut += 1
    return (ordered[num_cut - 1], ordered[-num_cut]) if num_cut else None


def median_and_interval(values: Sequence[float], digits: int = 4) -> list[float]:
    """Median, low and high end, rounded; the median alone where there is no interval."""
    return [round(v, digits) for v in (median(values), *(median_interval(values) or ()))]


def _share_below(count: int, total: int) -> float:
    """Probability that at most `count` of `total` values are below the true median."""
    return float(sum(math.comb(total, k) for k in range(count + 1)) / 2**total)
