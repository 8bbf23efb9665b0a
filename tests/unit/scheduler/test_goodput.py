"""Policy goodput: as many on time as can be, among the requests known now."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.scheduler.policy import MAX_CONSIDERED
from tests.unit.scheduler.candidates import Prefill, by_urgency, kept
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import FixedRatePredictor, make_arrival, make_scheduler

# Quarters and eighths: sums of floats are exact.
remaining_times = st.integers(1, 40).map(lambda n: n / 8)
deadlines = st.integers(1, 80).map(lambda n: n / 4)
stretches = st.sampled_from([1.0, 1.25, 2.0])


def are_on_time(ordered: Iterable[Prefill], now_s: float, stretch: float) -> bool:
    """Whether each meets its deadline if they run one behind the other."""
    end_s = now_s
    for candidate in ordered:
        end_s += candidate.remaining_s * stretch
        if end_s > candidate.deadline_s:
            return False
    return True


def largest_feasible(candidates: Sequence[Prefill], now_s: float, stretch: float) -> int:
    """Size of the largest subset that can be on time; earliest deadline first decides that."""
    for size in range(len(candidates), 0, -1):
        for subset in itertools.combinations(candidates, size):
            if are_on_time(by_urgency(*subset), now_s, stretch):
                return size
    return 0


jobs = st.lists(st.tuples(remaining_times, deadlines), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(jobs=jobs, now_s=st.sampled_from([0.0, 1.5]), stretch=stretches)
def test_with_equal_weights_the_kept_set_is_as_large_as_any_that_can_be_on_time(
    jobs: list[tuple[float, float]], now_s: float, stretch: float
) -> None:
    candidates = [Prefill(i, remaining_s=r, deadline_s=d) for i, (r, d) in enumerate(jobs)]
    ids = kept("goodput", *candidates, now_s=now_s, stretch=stretch)
    chosen = by_urgency(*(c for c in candidates if c.req_id in ids))
    assert are_on_time(chosen, now_s, stretch)
    assert len(chosen) == largest_feasible(candidates, now_s, stretch)


ranked_jobs = st.lists(
    st.tuples(remaining_times, deadlines, st.integers(0, 2), st.sampled_from([0.5, 1.0, 4.0])),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(jobs=ranked_jobs, stretch=stretches)
def test_ranks_and_weights_never_keep_more_than_can_be_on_time(
    jobs: list[tuple[float, float, int, float]], stretch: float
) -> None:
    candidates = [
        Prefill(i, remaining_s=r, deadline_s=d, rank=rank, weight=weight)
        for i, (r, d, rank, weight) in enumerate(jobs)
    ]
    ids = kept("goodput", *candidates, stretch=stretch)
    assert are_on_time(by_urgency(*(c for c in candidates if c.req_id in ids)), 0.0, stretch)


@settings(max_examples=100, deadline=None)
@given(jobs=ranked_jobs, stretch=stretches)
def test_what_is_kept_of_a_rank_does_not_depend_on_lower_ranks(
    jobs: list[tuple[float, float, int, float]], stretch: float
) -> None:
    candidates = [
        Prefill(i, remaining_s=r, deadline_s=d, rank=rank, weight=weight)
        for i, (r, d, rank, weight) in enumerate(jobs)
    ]
    ids = kept("goodput", *candidates, stretch=stretch)
    for rank in {c.rank for c in candidates}:
        higher = [c for c in candidates if c.rank >= rank]
        assert kept("goodput", *higher, stretch=stretch) == {
            c.req_id for c in higher if c.req_id in ids
        }


def test_a_higher_rank_is_not_dropped_for_a_lower_one_with_an_earlier_deadline() -> None:
    high = Prefill(0, deadline_s=100, remaining_s=50, rank=1)
    low = Prefill(1, deadline_s=10, remaining_s=1)
    assert kept("goodput", high, low) == {0}


def test_the_one_that_takes_longest_is_dropped() -> None:
    candidates = [Prefill(i, deadline_s=4.0, remaining_s=r) for i, r in enumerate([1, 3, 2])]
    assert kept("goodput", *candidates) == {0, 2}


def test_of_equal_length_the_worthier_one_is_kept() -> None:
    candidates = [Prefill(i, deadline_s=4.0, remaining_s=3, weight=1 + i) for i in range(2)]
    assert kept("goodput", *candidates) == {1}


def test_what_takes_more_time_for_its_worth_is_dropped() -> None:
    short = Prefill(0, deadline_s=4.0, remaining_s=2, weight=1)
    long = Prefill(1, deadline_s=4.0, remaining_s=3, weight=2)
    assert kept("goodput", short, long) == {1}


def test_a_resumed_stream_is_never_dropped_and_drops_nobody_who_runs_before_it() -> None:
    before = Prefill(0, deadline_s=4.0, remaining_s=3)
    resumed = Prefill(1, deadline_s=math.inf, first_deadline_s=5.0, remaining_s=50)
    behind = Prefill(2, deadline_s=6.0, remaining_s=1)
    assert kept("goodput", before, resumed, behind) == {0, 1}


def test_the_requests_of_a_packed_prefill_take_its_time_once() -> None:
    pack = [Prefill(i, deadline_s=9.0, remaining_s=0.5, num_packed=8) for i in range(8)]
    tight = Prefill(8, deadline_s=5.5, remaining_s=5.0)
    assert kept("goodput", *pack, tight) == set(range(9))


def test_no_more_than_the_most_urgent_are_considered() -> None:
    """The rest is kept until its time comes: dropping bounds the time of a decision, no more."""
    num = MAX_CONSIDERED + 10
    candidates = [Prefill(i, deadline_s=5.0 + 1e-6 * i, remaining_s=1.0) for i in range(num)]
    ids = kept("goodput", *candidates)
    assert len(ids & set(range(MAX_CONSIDERED))) == 5
    assert ids >= set(range(MAX_CONSIDERED, num))


def test_a_pack_that_runs_lets_a_tight_newcomer_pass() -> None:
    device = Device(make_scheduler("goodput", predictor=FixedRatePredictor(saturation_tokens=400)))
    for req_id in range(8):
        device.submit(make_arrival(req_id, num_prompt_tokens=50, max_tokens=1, ttft_slo_s=1.0))
    device.submit(make_arrival(8, 0.1, num_prompt_tokens=500, max_tokens=1, ttft_slo_s=0.55))
    device.run()
    assert device.prefill_order() == [0, 8, 0]
    assert all(device.is_on_time(req_id) for req_id in range(9))


@pytest.mark.parametrize(("policy", "num_late"), [("edf", 3), ("s-edf", 3), ("goodput", 1)])
def test_goodput_gives_up_the_long_one_that_makes_others_late(policy: str, num_late: int) -> None:
    device = Device(make_scheduler(policy, starvation_share=0.0))
    device.submit(make_arrival(0, num_prompt_tokens=1000, max_tokens=1, ttft_slo_s=1.05))
    for req_id in range(1, 4):
        device.submit(
            make_arrival(req_id, 0.3, num_prompt_tokens=250, max_tokens=1, ttft_slo_s=0.8)
        )
    device.run()
    assert [device.is_on_time(req_id) for req_id in range(4)].count(False) == num_late
