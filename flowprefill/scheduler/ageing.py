"""StarvationGuard: late prefills get a share of the device although others go before them.

Requests that can be on time go before those that cannot, and higher ranks before lower ones; with
enough of the former the latter would never run. So while a prefill is past its deadline, credit
accrues at `share` of the time in which the one that has been late longest, of whatever rank, does
not run; and is spent on it. It is spent in stretches of share x PERIOD_S, when that makes nobody
late; after twice as much has accrued, in any case. So a late prefill that has been late longest
waits at most 2 x PERIOD_S for each stretch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from flowprefill.scheduler.policy import slack_s
from flowprefill.scheduler.tracked import Tracked

PERIOD_S = 2.0


class StarvationGuard:
    """Accounts for device time owed to late prefills."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._stretch_s = share * PERIOD_S
        self._credit_s = 0.0
        self._last_s = 0.0
        self._running_task: int | None = None  # since _last_s
        self._late: Tracked | None = None  # the one that has been late longest
        self._serves_late = False  # what runs is its prefill
        self._is_spending = False

    def pass_time(self, now_s: float, late: Tracked | None) -> None:
        """Account for the time since the last call. late: the one that has been late longest."""
        since_s, self._last_s = self._last_s, now_s
        self._late = late
        if late is None:
            self._credit_s = 0.0
        elif self._serves_late:
            self._credit_s -= now_s - since_s
        elif not self._runs(late):
            self._credit_s += self._share * (now_s - max(since_s, late.deadline_s))
        self._credit_s = min(max(self._credit_s, -self._stretch_s), 2 * self._stretch_s)
        if self._credit_s <= 0:
            self._is_spending = False
        elif self._credit_s >= self._stretch_s:
            self._is_spending = True

    def _runs(self, prefill: Tracked) -> bool:
        return prefill.task_id is not None and prefill.task_id == self._running_task

    def owes(self, best: Tracked, now_s: float, stretch: float) -> bool:
        """Whether the prefill that has been late longest goes before the policy's `best`."""
        if not self._is_spending:
            return False
        slack = slack_s(best, now_s, stretch)
        is_harmless = slack < 0 or slack >= self._credit_s
        return is_harmless or self._credit_s >= 2 * self._stretch_s

    def runs(self, prefill: Tracked | None) -> None:
        """What the device does from now on; a decode step or nothing: None."""
        late = self._late
        self._running_task = prefill.task_id if prefill else None
        self._serves_late = late is not None and self._runs(late)

    def wake_s(self, now_s: float, min_s: float, candidates: Sequence[Tracked]) -> float | None:
        """When to decide again: a granted stretch ends, or one can be granted; None = neither.

        min_s: seconds that lie between two such wake-ups at least
        """
        if self._share == 0:
            return None
        if self._serves_late:
            return now_s + max(self._credit_s, min_s) if self._is_spending else None
        if self._late is None:
            first = first_due(candidates, self._running_task)
            return first.deadline_s + PERIOD_S if first else None
        if self._credit_s >= 2 * self._stretch_s:
            return None  # there is no room for it, and only an event can change that
        target_s = self._stretch_s * (1 if self._credit_s < self._stretch_s else 2)
        return now_s + max((target_s - self._credit_s) / self._share, min_s)


def first_due(candidates: Sequence[Tracked], running_task: int | None = None) -> Tracked | None:
    """The one that was or will be late first, if any can; candidates in the order of urgency.

    running_task: its requests do not count
    """
    first: Tracked | None = None
    start = 0
    while start < len(candidates):  # for each rank; within it the deadlines ascend
        end = bisect_right(candidates, -candidates[start].rank, lo=start, key=lambda c: -c.rank)
        for i in range(start, end):
            candidate = candidates[i]
            runs = running_task is not None and candidate.task_id == running_task
            if candidate.deadline_s < math.inf and not runs:
                if first is None or candidate.deadline_s < first.deadline_s:
                    first = candidate
                break
        start = end
    return first
