"""What was promised and what was kept: TTFT, TBT, SLO attainment, goodput. Pure functions of times.

All times are seconds on one clock, wherever it starts. Knows neither client nor engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestTimes:
    """When one request came in and when each of its tokens was there."""

    arrival_s: float
    token_s: tuple[float, ...]
    """Time of each token, in order; empty if the request never got one."""
    ttft_slo_s: float = math.inf
    tbt_slo_s: float = math.inf

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; infinite if there is none."""
        return self.token_s[0] - self.arrival_s if self.token_s else math.inf

    @property
    def tbt_s(self) -> list[float]:
        """The gaps between its tokens; empty for fewer than two tokens."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def tpot_s(self) -> float | None:
        """The mean gap; None for fewer than two tokens."""
        gaps = len(self.token_s) - 1
        return (self.token_s[-1] - self.token_s[0]) / gaps if gaps > 0 else None

    def met_slo(self) -> bool:
        """True if the first token was in time and so was every gap."""
        return self.ttft_s <= self.ttft_slo_s and all(g <= self.tbt_slo_s for g in self.tbt_s)


def percentile(values: Iterable[float], q: float) -> float:
    """The q-th percentile, q in 0..100, linear between the two nearest values.

    Raises ValueError for no values or a q outside the range.
    """
    ordered = sorted(values)
    if not ordered or not 0 <= q <= 100:
        raise ValueError(f"percentile {q} of {len(ordered)} values")
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = math.ceil(position)
    if ordered[low] == ordered[high]:  # also keeps inf - inf out of the interpolation
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def slo_attainment(requests: Sequence[RequestTimes]) -> float:
    """Fraction of the requests that met every objective. Raises ValueError for no requests."""
    if not requests:
        raise ValueError("attainment of no requests")
    return sum(r.met_slo() for r in requests) / len(requests)


def goodput(requests: Sequence[RequestTimes], duration_s: float) -> float:
    """Requests per second that met every objective, over a run of `duration_s`."""
    if duration_s <= 0:
        raise ValueError(f"goodput over {duration_s} s")
    return sum(r.met_slo() for r in requests) / duration_s


def max_goodput(attainment_at_rate: Iterable[tuple[float, float]], target: float = 0.9) -> float:
    """Highest arrival rate up to which every measured rate reached the target attainment.

    attainment_at_rate: pairs of (arrival rate in requests per second, attainment in 0..1). A rate
    that passes above one that failed passed by luck and does not count. 0 if the lowest failed.
    """
    best = 0.0
    for rate, attainment in sorted(attainment_at_rate):
        if attainment < target:
            break
        best = rate
    return best
