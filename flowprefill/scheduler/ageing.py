"""StarvationGuard: late prefills get a share of the device although others go before them.

Requests that can be on time go before those that cannot, and higher ranks before lower ones; with
enough of the former the latter would never run. So while a prefill is past its deadline, credit
accrues at `share` of the time in which no late one runs, and is spent on the one that has been late
longest, of whatever rank. It is spent in stretches of share x PERIOD_S, when that makes nobody
late; after twice as much has accrued, in any case. So a late prefill waits at most 2 x PERIOD_S for
each stretch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flowprefill.scheduler.policy import slack_s
from flowprefill.scheduler.tracked import Tracked

PERIOD_S = 1.0


class StarvationGuard:
    """Accounts for device time owed to late prefills."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._stretch_s = share * PERIOD_S
        self._credit_s = 0.0
        self._last_s = 0.0
        self._serves_late = False  # a late prefill has run since _last_s
        self._is_spending = False
        self._has_late = False

    def pass_time(self, now_s: float, late: bool) -> None:
        """Account for the time since the last call. late: some prefill is past its deadline."""
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._has_late = late
        if not late:
            self._credit_s, self._is_spending = 0.0, False
        elif self._serves_late:
            self._credit_s -= elapsed_s
        else:
            self._credit_s += self._share * elapsed_s
        self._credit_s = min(max(self._credit_s, -self._stretch_s), 2 * self._stretch_s)

    def owes(self, best: Tracked, now_s: float, stretch: float) -> bool:
        """Whether the prefill that has been late longest goes before the policy's `best`."""
        if self._share == 0:
            return False
        if self._credit_s <= 0:
            self._is_spending = False
        elif self._credit_s >= self._stretch_s:
            self._is_spending = True
        if not self._is_spending:
            return False
        slack = slack_s(best, now_s, stretch)
        is_harmless = slack < 0 or slack >= self._credit_s
        return is_harmless or self._credit_s >= 2 * self._stretch_s

    def runs(self, prefill: Tracked | None, now_s: float) -> None:
        """What the device does from now on; a decode step or nothing: None."""
        self._serves_late = prefill is not None and prefill.deadline_s < now_s

    def wake_s(self, now_s: float, min_s: float) -> float | None:
        """When to decide again: a granted stretch ends, or one can be granted; None = neither.

        min_s: seconds that lie between two such wake-ups at least
        """
        if self._share == 0 or not self._has_late:
            return None
        if self._serves_late:
            if not self._is_spending:
                return None
            wait_s = self._credit_s
        else:
            target_s = self._stretch_s * (1 if self._credit_s < self._stretch_s else 2)
            wait_s = (target_s - self._credit_s) / self._share
        return now_s + max(wait_s, min_s)


def latest(candidates: Sequence[Tracked], now_s: float) -> Tracked | None:
    """The one that has been past its deadline longest, if any; candidates in urgency order."""
    if candidates[0].rank == candidates[-1].rank:  # then the deadlines ascend
        first = next((c for c in candidates if c.deadline_s != math.inf), None)
        return first if first is not None and first.deadline_s < now_s else None
    late = (c for c in candidates if c.deadline_s < now_s)
    return min(late, key=lambda c: c.deadline_s, default=None)
