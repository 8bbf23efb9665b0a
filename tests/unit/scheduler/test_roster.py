"""Roster: what the scenarios of the whole scheduler do not single out."""

from __future__ import annotations

from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.memory import KVMemory
from flowprefill.scheduler.roster import MAX_SKIPS, Roster
from flowprefill.scheduler.tracked import Tracked
from tests.unit.scheduler.helpers import FixedRatePredictor, make_arrival


def test_of_two_overdue_requests_the_more_urgent_one_keeps_others_from_starting() -> None:
    roster = Roster(KVMemory(BlockPool(100, 16), prefix_caching=True), FixedRatePredictor())
    for req_id, ttft_slo_s in ((0, 9.0), (1, 3.0)):
        roster.add(Tracked.of(make_arrival(req_id, ttft_slo_s=ttft_slo_s)))
        roster.skip(roster.requests[req_id])
    for req_id in range(2, 2 + MAX_SKIPS):
        assert roster.overdue() is None
        roster.add(Tracked.of(make_arrival(req_id, num_prompt_tokens=10)))
        assert roster.start(roster.requests[req_id], may_evict=False)
    assert roster.overdue() is roster.requests[1]
    between = Tracked.of(make_arrival(99, ttft_slo_s=6.0))
    assert not roster.may_start(between)
