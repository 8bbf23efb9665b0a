"""KV blocks: who grows, who loses them, and how those that lost them come back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import (
    Decision,
    DecodeStepDone,
    Finished,
    PrefillDone,
    PrefillParked,
)
from flowprefill.scheduler.memory import LOOKAHEAD_TOKENS
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    BLOCK_SIZE,
    document_keys,
    make_arrival,
    make_scheduler,
    pool_of,
    prefill_of,
    run_prefill,
    run_whole,
    step_of,
)


def start_decoding(scheduler: Scheduler, req_ids: Iterable[int], **fields: int) -> None:
    """The smaller the id, the more urgent."""
    for req_id in req_ids:
        arrival = make_arrival(req_id, ttft_slo_s=10.0 + req_id, **{"max_tokens": 40, **fields})
        run_prefill(scheduler, arrival)


def run_steps(scheduler: Scheduler, *req_ids: int, num_steps: int, now_s: float = 1.0) -> Decision:
    return scheduler.decide(now_s, [DecodeStepDone(req_ids, now_s, num_steps)])


# ---- growth -------------------------------------------------------------------------------------


def test_a_decoding_sequence_takes_blocks_ahead_before_its_own_are_full() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, [0], num_prompt_tokens=32, max_tokens=500)
    first = list(scheduler.block_ids(0))
    assert len(first) == 2 + LOOKAHEAD_TOKENS // BLOCK_SIZE
    assert scheduler.decide(0.0, []).max_steps == LOOKAHEAD_TOKENS
    half = LOOKAHEAD_TOKENS // 2
    assert run_steps(scheduler, 0, num_steps=half).max_steps == half, "it still has enough"
    assert scheduler.block_ids(0) == first
    assert run_steps(scheduler, 0, num_steps=1).max_steps >= LOOKAHEAD_TOKENS
    assert scheduler.block_ids(0)[: len(first)] == first


def test_all_take_blocks_ahead_when_the_first_of_them_needs_some() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, [0], num_prompt_tokens=32, max_tokens=500)
    run_steps(scheduler, 0, num_steps=LOOKAHEAD_TOKENS // 4)  # alone it would have enough
    start_decoding(scheduler, [1], num_prompt_tokens=20, max_tokens=500)
    assert scheduler.decide(1.0, []).max_steps >= LOOKAHEAD_TOKENS


@pytest.mark.parametrize(("num_free", "num_taken"), [(31, 0), (32, 4)])
def test_blocks_are_taken_ahead_up_to_an_eighth_of_those_free(
    num_free: int, num_taken: int
) -> None:
    scheduler = make_scheduler(num_blocks=2 + num_free)
    start_decoding(scheduler, [0], num_prompt_tokens=24, max_tokens=500)
    assert len(scheduler.block_ids(0)) == 2 + num_taken


def test_it_takes_no_more_blocks_than_its_last_token_needs() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, [0], num_prompt_tokens=32, max_tokens=20)
    run_steps(scheduler, 0, num_steps=0)
    assert len(scheduler.block_ids(0)) == 4  # 52 tokens


def test_where_blocks_are_scarce_it_takes_one_when_its_own_are_full() -> None:
    scheduler = make_scheduler(num_blocks=8)
    start_decoding(scheduler, [0], num_prompt_tokens=30, max_tokens=90)
    assert scheduler.decide(0.0, []).max_steps == 2
    first = list(scheduler.block_ids(0))
    assert len(first) == 2
    decision = run_steps(scheduler, 0, num_steps=2)
    assert scheduler.block_ids(0)[:2] == first
    assert len(scheduler.block_ids(0)) == 3
    assert decision.max_steps == BLOCK_SIZE


def test_a_step_runs_only_as_often_as_all_its_sequences_have_room() -> None:
    scheduler = make_scheduler(num_blocks=10)  # too few to take any ahead
    start_decoding(scheduler, [0], num_prompt_tokens=25)
    start_decoding(scheduler, [1], num_prompt_tokens=30)
    assert scheduler.decide(0.0, []).max_steps == 2


# ---- eviction -----------------------------------------------------------------------------------


def test_the_least_urgent_holder_loses_its_blocks_to_one_that_grows() -> None:
    scheduler = make_scheduler(num_blocks=6)
    start_decoding(scheduler, [1, 0, 2], num_prompt_tokens=30)
    decision = run_steps(scheduler, 0, 1, 2, num_steps=2)
    assert decision.evicted == (2,)
    assert set(step_of(decision).req_ids) == {0, 1}
    assert scheduler.status(2) is RequestStatus.WAITING
    assert scheduler.block_ids(2) == []
    assert scheduler.num_evictions == 1


def test_a_parked_prefill_is_evicted_like_a_decoding_sequence() -> None:
    scheduler = make_scheduler(num_blocks=6)
    start_decoding(scheduler, [0], num_prompt_tokens=30)
    less_urgent = make_arrival(9, num_prompt_tokens=64, max_tokens=1, ttft_slo_s=60)
    task = prefill_of(scheduler.decide(0.1, [less_urgent]))
    parked = PrefillParked(task.task_id, 0.02)
    decision = scheduler.decide(0.2, [parked, DecodeStepDone((0,), 0.2, num_steps=2)])
    assert decision.evicted == (9,)
    assert not scheduler.is_live(task.task_id)
    assert step_of(decision).req_ids == (0,)


def test_one_that_finds_nobody_below_it_is_evicted_itself() -> None:
    scheduler = make_scheduler(num_blocks=4)
    start_decoding(scheduler, [0], num_prompt_tokens=20, max_tokens=40)
    start_decoding(scheduler, [1], num_prompt_tokens=30, max_tokens=30)
    decision = run_steps(scheduler, 0, 1, num_steps=2)
    assert decision.evicted == (1,)
    assert step_of(decision).req_ids == (0,)


def test_when_all_of_a_step_lose_their_blocks_it_goes_on_with_others() -> None:
    scheduler = make_scheduler(num_blocks=4, max_num_seqs=1)
    start_decoding(scheduler, [1], num_prompt_tokens=30, max_tokens=30)
    start_decoding(scheduler, [0], num_prompt_tokens=20, max_tokens=40)
    scheduler.decide(0.1, [DecodeStepDone((1,), 0.1, num_steps=2)])
    decision = scheduler.decide(0.2, [DecodeStepDone((0,), 0.2)])  # now 1 is due first
    assert decision.evicted == (1,)
    assert step_of(decision).req_ids == (0,)


def test_steps_beside_a_prefill_go_on_with_those_that_it_left_their_blocks() -> None:
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=1)
    start_decoding(scheduler, [2, 0], num_prompt_tokens=60)
    scheduler.decide(0.1, [DecodeStepDone((0,), 0.1)])  # 2 is due first
    urgent = make_arrival(9, 0.1, num_prompt_tokens=80, max_tokens=1, ttft_slo_s=1)
    decision = scheduler.decide(0.1, [urgent])
    assert prefill_of(decision).req_ids == (9,)
    assert decision.evicted == (2,)
    assert decision.steps is not None
    assert decision.steps.step.req_ids == (0,)


def test_an_urgent_newcomer_takes_blocks_from_the_least_urgent_first() -> None:
    scheduler = make_scheduler(num_blocks=12)
    start_decoding(scheduler, [0, 1, 2], num_prompt_tokens=60)
    urgent = make_arrival(9, 0.1, num_prompt_tokens=60, max_tokens=1, ttft_slo_s=1)
    decision = scheduler.decide(0.1, [urgent])
    assert prefill_of(decision).req_ids == (9,)
    assert decision.evicted == (2,)


def test_nobody_is_evicted_for_a_newcomer_that_would_not_fit_all_the_same() -> None:
    scheduler = make_scheduler(num_blocks=12)
    start_decoding(scheduler, [0, 2], num_prompt_tokens=60)
    middle = make_arrival(9, 0.1, num_prompt_tokens=150, max_tokens=1, ttft_slo_s=11)
    decision = scheduler.decide(0.1, [middle])
    assert decision.evicted == ()
    assert set(step_of(decision).req_ids) == {0, 2}


def test_a_less_urgent_newcomer_takes_no_blocks() -> None:
    scheduler = make_scheduler("sjf", num_blocks=12)
    start_decoding(scheduler, [0], num_prompt_tokens=100)
    task = prefill_of(scheduler.decide(0.1, [make_arrival(1, num_prompt_tokens=70, ttft_slo_s=60)]))
    shorter = make_arrival(2, 0.1, num_prompt_tokens=20, ttft_slo_s=90)
    decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 0.01), shorter])
    assert decision.task == task and decision.evicted == ()


def test_a_higher_rank_takes_blocks_from_a_lower_one_with_an_earlier_deadline() -> None:
    scheduler = make_scheduler(num_blocks=12)
    start_decoding(scheduler, [0], num_prompt_tokens=100)
    high = make_arrival(9, 0.1, num_prompt_tokens=150, max_tokens=1, ttft_slo_s=60, rank=1)
    decision = scheduler.decide(0.1, [high])
    assert prefill_of(decision).req_ids == (9,) and decision.evicted == (0,)


def start_two_that_share(scheduler: Scheduler) -> None:
    """Requests 0 and 1 decode with 10 shared blocks, and one each of their own that lasts."""
    keys = document_keys("d", 160)
    run_whole(scheduler, make_arrival(8, num_prompt_tokens=165, max_tokens=1, prefix_keys=keys))
    for req_id in (0, 1):
        arrival = make_arrival(
            req_id,
            ttft_slo_s=10.0 + req_id,
            num_prompt_tokens=165,
            max_tokens=10,
            prefix_keys=keys,
        )
        run_prefill(scheduler, arrival)
    assert pool_of(scheduler).num_used == 12


@pytest.mark.parametrize(("num_blocks_needed", "evicted"), [(11, (1,)), (12, (1, 0))])
def test_blocks_that_another_one_shares_are_not_freed_with_their_holder(
    num_blocks_needed: int, evicted: tuple[int, ...]
) -> None:
    scheduler = make_scheduler(num_blocks=22)
    start_two_that_share(scheduler)
    urgent = make_arrival(
        9, 0.1, num_prompt_tokens=16 * num_blocks_needed, max_tokens=1, ttft_slo_s=1
    )
    decision = scheduler.decide(0.1, [urgent])
    assert prefill_of(decision).req_ids == (9,)
    assert decision.evicted == evicted


def test_blocks_that_the_newcomer_shares_with_its_victims_are_not_counted_as_freed() -> None:
    scheduler = make_scheduler(num_blocks=22)
    start_two_that_share(scheduler)
    # It finds 10 blocks and needs 12 more; 10 are free and each victim frees one.
    urgent = make_arrival(
        9,
        0.1,
        num_prompt_tokens=16 * 22,
        max_tokens=0,
        ttft_slo_s=1,
        prefix_keys=document_keys("d", 160),
    )
    decision = scheduler.decide(0.1, [urgent])
    assert prefill_of(decision).req_ids == (9,)
    assert decision.evicted == (1, 0)
    assert scheduler.num_cached_tokens(9) == 160
    scheduler.check_integrity()


def test_nobody_is_evicted_for_blocks_that_the_newcomer_would_share_all_the_same() -> None:
    scheduler = make_scheduler(num_blocks=23)
    keys = document_keys("d", 160)
    run_prefill(scheduler, make_arrival(7, num_prompt_tokens=10, max_tokens=6, ttft_slo_s=0.5))
    holder = make_arrival(0, num_prompt_tokens=165, max_tokens=10, prefix_keys=keys)
    run_prefill(scheduler, holder)
    assert pool_of(scheduler).num_used == 12
    # It finds 10 of the 11 blocks of request 0, and needs 13 more; 11 are free.
    newcomer = make_arrival(
        9, 0.1, num_prompt_tokens=16 * 23, max_tokens=0, ttft_slo_s=5, prefix_keys=keys
    )
    decision = scheduler.decide(0.1, [newcomer])
    assert decision.evicted == ()
    assert scheduler.status(9) is RequestStatus.WAITING


# ---- coming back --------------------------------------------------------------------------------


def test_a_victim_starts_again_only_when_its_whole_need_is_free() -> None:
    scheduler = make_scheduler(num_blocks=12)
    start_decoding(scheduler, [0], num_prompt_tokens=60, max_tokens=100)  # 10 blocks in all
    urgent = make_arrival(9, 0.1, num_prompt_tokens=140, max_tokens=40, ttft_slo_s=1)
    other = make_arrival(8, 0.1, num_prompt_tokens=40, max_tokens=5, ttft_slo_s=60)
    decision = scheduler.decide(0.1, [urgent])
    assert decision.evicted == (0,)
    decision = scheduler.decide(0.2, [PrefillDone(prefill_of(decision).task_id), other])
    # 3 blocks are free: enough for the prompt of 8; not for that of 0, nor for its whole need.
    assert prefill_of(decision).req_ids == (8,)
    decision = scheduler.decide(0.3, [PrefillDone(prefill_of(decision).task_id)])
    decision = scheduler.decide(0.4, [Finished(9)])
    assert step_of(decision).req_ids == (8,), "9 free blocks are enough for its prompt only"
    assert prefill_of(scheduler.decide(0.5, [Finished(8)])).req_ids == (0,)


def test_prompt_and_generated_tokens_are_computed_again_and_the_stream_goes_on() -> None:
    device = Device(make_scheduler("edf", num_blocks=12))
    device.submit(make_arrival(0, num_prompt_tokens=100, max_tokens=30))
    # By then request 0 has some tokens: the first at 0.1, and one each 10 ms.
    device.submit(make_arrival(1, 0.149, num_prompt_tokens=150, max_tokens=1, ttft_slo_s=1))
    device.run()
    assert [d.evicted for _, d in device.decisions if d.evicted] == [(0,)]
    assert device.is_on_time(1)
    num_before = sum(t < 0.16 for t in device.token_times[0])
    assert len(device.token_times[0]) == 30
    again_s = [
        ran.end_s - ran.start_s for ran in device.log if ran.start_s > 0.25 and not ran.is_step
    ]
    assert sum(again_s) == pytest.approx((100 + num_before) / 1000)
    resumed_s = device.token_times[0][num_before]
    assert resumed_s == pytest.approx(device.token_times[1][0] + sum(again_s))


def test_a_resumed_stream_is_not_urgent_by_its_missed_gap_but_keeps_its_place() -> None:
    """Its first token has been given: it cannot be late, and goes by the deadline it came with."""
    device = Device(make_scheduler("s-edf", num_blocks=12))
    device.submit(make_arrival(0, num_prompt_tokens=100, max_tokens=30, ttft_slo_s=2))
    device.submit(make_arrival(1, 0.149, num_prompt_tokens=150, max_tokens=1, ttft_slo_s=1))
    device.submit(make_arrival(2, 0.2, num_prompt_tokens=60, max_tokens=1, ttft_slo_s=1.5))
    device.submit(make_arrival(3, 0.2, num_prompt_tokens=60, max_tokens=1, ttft_slo_s=2.5))
    device.run()
    assert device.prefill_order() == [0, 1, 2, 0, 3]


def test_what_is_still_cached_of_a_victim_is_not_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=12)
    keys = document_keys("d", 100)
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=100, prefix_keys=keys))
    urgent = make_arrival(1, 0.1, num_prompt_tokens=120, max_tokens=1, ttft_slo_s=1)
    decision = scheduler.decide(0.1, [urgent])
    assert decision.evicted == (0,)
    done = [PrefillDone(prefill_of(decision).task_id), Finished(1)]
    assert prefill_of(scheduler.decide(0.3, done)).req_ids == (0,)
    # 5 of its 6 published blocks: 8 were needed, 5 free, and the last are forgotten first.
    assert scheduler.num_cached_tokens(0) == 4 * BLOCK_SIZE


def test_a_decode_step_left_midway_is_run_again_without_the_evicted() -> None:
    device = Device(make_scheduler("edf", num_blocks=12, step_s=0.1))
    device.submit(make_arrival(0, num_prompt_tokens=40, max_tokens=5, ttft_slo_s=5))
    device.submit(make_arrival(1, num_prompt_tokens=40, max_tokens=5, ttft_slo_s=6))
    device.submit(make_arrival(2, 0.131, num_prompt_tokens=100, max_tokens=1, ttft_slo_s=1))
    device.run()
    assert [d.evicted for _, d in device.decisions if d.evicted] == [(1,)]
    assert [len(device.token_times[r]) for r in range(3)] == [5, 5, 1]
    assert device.is_on_time(2)


# ---- late ones ----------------------------------------------------------------------------------

GIVING_UP = [name for name, policy in sorted(POLICIES.items()) if policy.gives_up_late]


def park_two_late(scheduler: Scheduler, num_prompt_tokens: int = 100) -> PrefillParked:
    """Prefills of two requests that are late by 0.2: 1, and 0, which is late longest, ran last."""
    needed_s = num_prompt_tokens / 1000
    first, urgent = (
        make_arrival(
            req_id, at_s, num_prompt_tokens=num_prompt_tokens, max_tokens=1, ttft_slo_s=slo_s
        )
        for req_id, at_s, slo_s in ((1, 0.0, needed_s + 0.02), (0, 0.01, needed_s + 0.005))
    )
    task = prefill_of(scheduler.decide(0.0, [first]))
    assert task.req_ids == (1,)
    decision = scheduler.decide(0.01, [PrefillParked(task.task_id, needed_s + 0.003), urgent])
    assert prefill_of(decision).req_ids == (0,)
    return PrefillParked(prefill_of(decision).task_id, needed_s / 2)


@pytest.mark.parametrize("policy", GIVING_UP)
def test_a_newcomer_that_can_be_on_time_takes_blocks_from_a_late_prefill(policy: str) -> None:
    scheduler = make_scheduler(policy, num_blocks=16)
    parked = park_two_late(scheduler)
    newcomer = make_arrival(2, 0.2, num_prompt_tokens=60, max_tokens=1, ttft_slo_s=0.1)
    decision = scheduler.decide(0.2, [parked, newcomer])
    assert prefill_of(decision).req_ids == (2,) and decision.evicted == (1,)


@pytest.mark.parametrize("policy", GIVING_UP)
def test_the_one_late_longest_keeps_its_blocks(policy: str) -> None:
    scheduler = make_scheduler(policy, num_blocks=16)
    parked = park_two_late(scheduler)
    # It needs 10 blocks: 2 are free, and each of the late ones holds 7.
    newcomer = make_arrival(2, 0.2, num_prompt_tokens=150, max_tokens=1, ttft_slo_s=0.2)
    decision = scheduler.decide(0.2, [parked, newcomer])
    assert prefill_of(decision).task_id == parked.task_id and decision.evicted == ()


def test_under_a_policy_that_gives_nobody_up_late_prefills_keep_their_blocks() -> None:
    scheduler = make_scheduler("srpt", num_blocks=16)
    parked = park_two_late(scheduler)
    shorter = make_arrival(2, 0.2, num_prompt_tokens=40, max_tokens=1, ttft_slo_s=0.1)
    decision = scheduler.decide(0.2, [parked, shorter])
    assert prefill_of(decision).task_id == parked.task_id and decision.evicted == ()


@pytest.mark.parametrize("policy", GIVING_UP)
def test_a_stream_takes_its_next_block_from_a_late_prefill(policy: str) -> None:
    scheduler = make_scheduler(policy, num_blocks=8)
    start_decoding(scheduler, [9], num_prompt_tokens=30)
    parked = park_two_late(scheduler, num_prompt_tokens=40)
    decision = scheduler.decide(0.2, [parked, DecodeStepDone((9,), 0.2, num_steps=2)])
    assert decision.evicted == (1,)


@pytest.mark.parametrize("policy", GIVING_UP)
def test_parked_prefills_that_are_late_cost_no_newcomer_its_objective(policy: str) -> None:
    device = Device(make_scheduler(policy, num_blocks=40))
    for req_id, num_prompt_tokens in enumerate((180, 160, 140, 120)):
        # Each can be on time when it arrives, and takes the device and blocks: 39 of them.
        device.submit(
            make_arrival(
                req_id,
                0.01 * req_id,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=1,
                ttft_slo_s=num_prompt_tokens / 1000 + 0.005,
            )
        )
    newcomers = range(4, 14)
    for req_id in newcomers:
        arrival_s = 0.2 + 0.17 * (req_id - 4)
        device.submit(
            make_arrival(req_id, arrival_s, num_prompt_tokens=160, max_tokens=1, ttft_slo_s=0.2)
        )
    device.run()
    assert device.prefill_order()[:4] == [0, 1, 2, 3]
    assert all(map(device.is_on_time, newcomers))
    assert set(device.ended.values()) == {"finished"}


# ---- progress -----------------------------------------------------------------------------------


def test_the_most_urgent_holder_goes_on_to_its_end_undisturbed() -> None:
    device = Device(make_scheduler("edf", num_blocks=20))
    device.submit(make_arrival(0, num_prompt_tokens=100, max_tokens=200, ttft_slo_s=0.2))
    for req_id in range(1, 30):
        device.submit(
            make_arrival(req_id, 0.05 * req_id, num_prompt_tokens=60, max_tokens=100, ttft_slo_s=90)
        )
    device.run()
    evicted = [req_id for _, d in device.decisions for req_id in d.evicted]
    assert evicted and 0 not in evicted
    assert set(device.ended.values()) == {"finished"}


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equals_that_do_not_fit_together_all_end(policy: str) -> None:
    device = Device(make_scheduler(policy, num_blocks=9))
    for req_id in range(6):
        device.submit(make_arrival(req_id, num_prompt_tokens=30, max_tokens=100))
    device.run()
    assert [len(device.token_times[r]) for r in range(6)] == [100] * 6
    assert pool_of(device.scheduler).num_used == 0


requests = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 150), st.integers(1, 80), st.integers(0, 2)),
    min_size=2,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(requests=requests, policy=st.sampled_from(sorted(POLICIES)))
def test_whoever_is_evicted_there_is_a_holder_more_urgent(
    requests: list[tuple[int, int, int, int]], policy: str
) -> None:
    device = Device(make_scheduler(policy, num_blocks=15))
    for req_id, (at, num_prompt_tokens, max_tokens, rank) in enumerate(requests):
        arrival = make_arrival(
            req_id,
            0.03 * at,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            ttft_slo_s=0.3,
            rank=rank,
        )
        device.submit(arrival)
    device.run()  # the device checks it at each decision
    assert set(device.ended.values()) == {"finished"}
