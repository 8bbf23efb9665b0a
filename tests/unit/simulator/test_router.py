"""Routers: where requests go, by what a router knows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.scheduler.events import Arrival
from flowprefill.simulator.router import (
    NUM_CANDIDATES,
    ROUTERS,
    Backlogs,
    LeastLoad,
    RoundRobin,
    SlackAware,
)


def prefill_s(num_tokens: int) -> float:
    return num_tokens / 1000


def arrival(req_id: int, arrival_s: float, num_tokens: int, ttft_slo_s: float = 1.0) -> Arrival:
    return Arrival(req_id, arrival_s, num_tokens, 1, ttft_slo_s, 0.1)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin(3, prefill_s, 0)
    assert [router.choose(arrival(i, 0.0, 10**i)) for i in range(5)] == [0, 1, 2, 0, 1]


def test_least_load_counts_seconds_not_requests() -> None:
    router = LeastLoad(2, prefill_s, 0)
    assert router.choose(arrival(0, 0.0, 5000)) == 0
    assert [router.choose(arrival(i, 0.0, 1000)) for i in (1, 2, 3)] == [1, 1, 1]


def test_least_load_takes_replicas_to_work_meanwhile() -> None:
    router = LeastLoad(2, prefill_s, 0)
    assert router.choose(arrival(0, 0.0, 3000)) == 0
    assert router.choose(arrival(1, 2.9, 1000)) == 1
    assert router.choose(arrival(2, 2.9, 1000)) == 0  # 0.1 s are left there, 1 s here


def test_a_first_token_before_its_time_corrects_the_backlog() -> None:
    router = LeastLoad(2, prefill_s, 0)
    assert router.choose(arrival(0, 0.0, 3000)) == 0
    assert router.choose(arrival(1, 0.0, 1000)) == 1
    router.first_token(0, 0, 0.5)
    assert router.choose(arrival(2, 0.5, 100)) == 0


def test_slack_aware_leaves_long_work_to_be_preempted() -> None:
    """Least load would send the urgent request to the second replica, behind one that is as urgent:
    there it would be late."""
    requests = [
        arrival(0, 0.0, 5000, ttft_slo_s=60.0),
        arrival(1, 0.0, 900, ttft_slo_s=1.0),
        arrival(2, 0.0, 500, ttft_slo_s=1.2),
    ]
    slack_aware, least_load = SlackAware(2, prefill_s, 0), LeastLoad(2, prefill_s, 0)
    assert [slack_aware.choose(r) for r in requests] == [0, 1, 0]
    assert [least_load.choose(r) for r in requests] == [0, 1, 1]


def test_slack_aware_sends_the_hopeless_where_least_waits() -> None:
    router = SlackAware(2, prefill_s, 0)
    assert router.choose(arrival(0, 0.0, 2000, ttft_slo_s=60.0)) == 0
    assert router.choose(arrival(1, 0.0, 1000, ttft_slo_s=1.0)) == 1
    # 5 s of prefill in 2 s: late anywhere. On the first replica nothing would go before it.
    assert router.choose(arrival(2, 0.0, 5000, ttft_slo_s=2.0)) == 1


def test_slack_aware_does_not_count_what_is_late() -> None:
    router = SlackAware(1, prefill_s, 0)
    router.choose(arrival(0, 0.0, 5000, ttft_slo_s=1.0))
    late = arrival(1, 2.0, 10, ttft_slo_s=3.0)
    assert router._ahead_s(0, late) == (0.0, pytest.approx(3.0))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("num_replicas", [1, 3, 10 * NUM_CANDIDATES])
def test_all_replicas_share_a_steady_load(name: str, num_replicas: int) -> None:
    router = ROUTERS[name](num_replicas, prefill_s, 1)
    draw = random.Random(0)
    free_s = [0.0] * num_replicas
    work_s = [0.0] * num_replicas
    pending: list[tuple[float, int, int]] = []
    now_s = 0.0
    for req_id in range(40 * num_replicas):
        now_s += draw.expovariate(0.7 * num_replicas)
        for end_s, replica, ended in sorted(p for p in pending if p[0] < now_s):
            router.first_token(replica, ended, end_s)
        pending = [p for p in pending if p[0] >= now_s]
        chosen = router.choose(arrival(req_id, now_s, 1000))
        assert 0 <= chosen < num_replicas
        free_s[chosen] = max(free_s[chosen], now_s) + 1.0
        work_s[chosen] += 1.0
        pending.append((free_s[chosen], chosen, req_id))
    assert max(work_s) <= 2 * sum(work_s) / num_replicas
    assert min(work_s) > 0


class TestBacklogs:
    @given(
        st.lists(
            st.tuples(st.booleans(), st.integers(0, 4), st.floats(0.0, 3.0), st.floats(0.01, 5.0)),
            max_size=200,
        )
    )
    def test_the_least_is_the_least_of_all(
        self, steps: list[tuple[bool, int, float, float]]
    ) -> None:
        backlogs = Backlogs(5)
        live: list[tuple[int, int]] = []
        now_s = 0.0
        for req_id, (is_end, replica, wait_s, seconds) in enumerate(steps):
            now_s += wait_s
            if is_end and live:
                backlogs.remove(*live.pop(0), now_s)
            else:
                backlogs.add(replica, arrival(req_id, now_s, 1), seconds)
                live.append((replica, req_id))
            all_s = [backlogs.backlog_s(i, now_s) for i in range(5)]
            assert all_s[backlogs.least()] == min(all_s)
            for i in range(5):
                unfinished = backlogs.unfinished[i].values()
                assert all_s[i] <= sum(s for _, s in unfinished) + 1e-6

    def test_it_remembers_no_more_than_what_is_unfinished(self) -> None:
        backlogs = Backlogs(4)
        for req_id in range(10_000):
            replica = backlogs.least()
            backlogs.add(replica, arrival(req_id, req_id / 10, 1), 1.0)
            backlogs.remove(replica, req_id, req_id / 10 + 0.05)
        assert not any(backlogs.unfinished)
        assert len(backlogs._heap) < 200
