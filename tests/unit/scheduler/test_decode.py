"""When decode steps run beside prefills, and who is in them."""

from __future__ import annotations

import pytest

from flowprefill.scheduler.decode import TBT_MARGIN
from flowprefill.scheduler.events import (
    DecodeStep,
    DecodeStepDone,
    PacedSteps,
    PrefillDone,
    PrefillParked,
)
from flowprefill.scheduler.memory import LOOKAHEAD_TOKENS
from flowprefill.scheduler.scheduler import Scheduler
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    SLICE_S,
    STEP_S,
    FixedRatePredictor,
    make_arrival,
    make_scheduler,
    prefill_of,
    run_prefill,
    step_of,
)

RELEASE_S = (1 - TBT_MARGIN) * 0.2 - STEP_S - SLICE_S
"""From one token to the release of the next step, with tbt_slo_s 0.2."""


def start_decoding(scheduler: Scheduler, *req_ids: int, **fields: float) -> None:
    for req_id in req_ids:
        run_prefill(scheduler, make_arrival(req_id, num_prompt_tokens=1, **fields))


def steps_beside(scheduler: Scheduler, now_s: float = 0.0, **fields: float) -> PacedSteps:
    """The steps that run beside a prefill that arrives now."""
    arrival = make_arrival(99, now_s, **{"num_prompt_tokens": 2000, **fields})
    decision = scheduler.decide(now_s, [arrival])
    assert prefill_of(decision).req_ids == (99,)
    assert decision.steps is not None
    return decision.steps


def test_a_step_runs_at_once_and_repeats_when_no_prefill_can_run() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0, 1)
    decision = scheduler.decide(0.0, [])
    assert decision.task == DecodeStep((0, 1))
    assert decision.max_steps > 1 and decision.timer_s is None


def test_steps_with_unchanged_membership_need_no_decision_but_for_blocks() -> None:
    device = Device(make_scheduler())
    device.submit(make_arrival(0, max_tokens=100))
    device.run()
    assert len(device.token_times[0]) == 100
    assert max(device.gaps(0)) == pytest.approx(STEP_S)
    # Arrival, first token, end; and blocks for 64 tokens at a time: with the first, and at 176.
    assert device.scheduler.num_decisions == 4


def test_sequences_that_joined_at_different_times_take_their_blocks_in_the_same_decisions() -> None:
    num_each = 4 * LOOKAHEAD_TOKENS
    device = Device(make_scheduler())
    for req_id in range(2):  # the second one joins halfway to the end of the first one's blocks
        arrival_s = req_id * STEP_S * LOOKAHEAD_TOKENS / 2
        device.submit(make_arrival(req_id, arrival_s, num_prompt_tokens=10, max_tokens=num_each))
    device.run()
    num_steps = sum(ran.is_step for ran in device.log)
    num_for_events = 2 * 3  # arrival, first token, end
    assert device.scheduler.num_decisions <= num_for_events + num_steps / LOOKAHEAD_TOKENS


def test_beside_a_prefill_a_step_is_released_in_time_for_its_token_and_a_margin() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)
    steps = steps_beside(scheduler)
    assert steps.step == DecodeStep((0,))
    assert steps.release_s == pytest.approx(RELEASE_S)
    assert steps.interval_s == pytest.approx(RELEASE_S)


def test_the_sequence_that_is_due_first_sets_the_pace() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0, tbt_slo_s=0.5)
    start_decoding(scheduler, 1, tbt_slo_s=0.1)
    steps = steps_beside(scheduler)
    assert steps.step == DecodeStep((0, 1))
    release_s = (1 - TBT_MARGIN) * 0.1 - STEP_S - SLICE_S
    assert steps.release_s == pytest.approx(release_s)
    assert steps.interval_s == pytest.approx(release_s)


def test_prefills_get_their_share_after_a_step_that_ended_before_they_came() -> None:
    scheduler = make_scheduler(max_decode_share=0.25, step_s=0.03)
    start_decoding(scheduler, 0, tbt_slo_s=0.03)
    scheduler.decide(1.0, [DecodeStepDone((0,), 1.0)])
    assert steps_beside(scheduler, 1.0).release_s == pytest.approx(1.0 + 0.09)


def test_paced_steps_hold_until_the_next_decision_and_count_from_the_last_token() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)
    task = prefill_of(scheduler.decide(0.0, [make_arrival(1, num_prompt_tokens=2000)]))
    done = DecodeStepDone((0,), RELEASE_S + STEP_S)
    later = scheduler.decide(0.3, [PrefillParked(task.task_id, 1.7), done])
    assert later.task == task
    assert later.steps is not None
    assert later.steps.release_s == pytest.approx(done.end_s + RELEASE_S)


def test_a_long_prefill_with_steps_beside_it_needs_no_decision_but_for_blocks() -> None:
    device = Device(make_scheduler())
    device.submit(make_arrival(0, num_prompt_tokens=10, max_tokens=60))
    device.submit(make_arrival(1, 0.05, num_prompt_tokens=9000, max_tokens=1))
    device.run(until_s=9.0)
    beside = [t for t, _ in device.decisions if 0.05 < t < 9.0]
    assert len(device.token_times[0]) > 40
    assert len(beside) <= 1


def test_all_tokens_are_on_time_during_a_long_prefill() -> None:
    device = Device(make_scheduler())
    device.submit(make_arrival(0, num_prompt_tokens=10, max_tokens=20))
    device.submit(make_arrival(1, 0.05, num_prompt_tokens=3000, max_tokens=1))
    device.run()
    assert len(device.token_times[0]) == 20
    assert max(device.gaps(0)) <= (1 - TBT_MARGIN) * 0.2 + 1e-9
    assert device.token_times[1][0] <= 3.06 / (1 - STEP_S / 0.18) + 0.1


def test_steps_run_no_earlier_than_needed_during_a_long_prefill() -> None:
    device = Device(make_scheduler())
    device.submit(make_arrival(0, num_prompt_tokens=10, max_tokens=60))
    device.submit(make_arrival(1, 0.05, num_prompt_tokens=3000, max_tokens=1))
    device.run(until_s=3.0)
    beside = device.gaps(0, from_s=0.06)
    assert len(beside) >= 14
    assert min(beside) >= RELEASE_S


def test_max_steps_is_the_room_in_the_blocks() -> None:
    scheduler = make_scheduler(num_blocks=8)  # too few to take any ahead
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=10, max_tokens=100))
    assert steps_beside(scheduler, num_prompt_tokens=50).max_steps == 16 - 10


def test_an_urgent_prefill_that_would_miss_its_deadline_goes_before_the_step() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)  # its token is due at 0.2, the step released at 0.166
    steps = steps_beside(scheduler, 0.187, num_prompt_tokens=5, ttft_slo_s=0.009)
    assert steps.release_s == pytest.approx(0.2), "it may pass only until the token is due"


@pytest.mark.parametrize(
    ("num_prompt_tokens", "ttft_slo_s"),
    [
        pytest.param(2, 0.0125, id="can wait for the step"),
        pytest.param(5, 0.0140, id="its deadline is the later one"),
        pytest.param(9, 0.0080, id="is late anyway"),
    ],
)
def test_any_other_prefill_lets_a_released_step_pass(
    num_prompt_tokens: int, ttft_slo_s: float
) -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)
    steps = steps_beside(
        scheduler, 0.187, num_prompt_tokens=num_prompt_tokens, ttft_slo_s=ttft_slo_s
    )
    assert steps.release_s <= 0.187


def test_a_stream_of_urgent_prefills_never_starves_decode() -> None:
    device = Device(make_scheduler("s-edf"))
    device.submit(make_arrival(0, num_prompt_tokens=1, max_tokens=30, tbt_slo_s=0.1))
    for req_id in range(1, 400):  # 95% of the device, each on time only if it runs almost at once
        device.submit(
            make_arrival(
                req_id, 0.02 * req_id, num_prompt_tokens=19, max_tokens=1, ttft_slo_s=0.025
            )
        )
    device.run()
    assert len(device.token_times[0]) == 30
    assert max(device.gaps(0)) <= 0.1 + SLICE_S + STEP_S + 1e-9


def test_a_newcomer_waits_for_a_slice_of_the_step_and_not_for_its_end() -> None:
    device = Device(make_scheduler(step_s=0.1, max_decode_share=0.25))
    device.submit(make_arrival(0, num_prompt_tokens=1, max_tokens=10, tbt_slo_s=0.5))
    device.submit(make_arrival(1, 0.15, num_prompt_tokens=50, max_tokens=1))
    device.run()
    assert device.ttft_s(1) <= 0.05 + SLICE_S + 1e-9
    # The step that was left goes on where it was.
    assert device.token_times[0][-1] == pytest.approx(0.001 + 9 * 0.1 + 0.05)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_decode_takes_at_most_its_share_from_a_waiting_prefill(share: float) -> None:
    device = Device(make_scheduler(max_decode_share=share, step_s=0.03))
    device.submit(make_arrival(0, num_prompt_tokens=1, max_tokens=500, tbt_slo_s=0.03))
    device.submit(make_arrival(1, 0.5, num_prompt_tokens=1000, max_tokens=1))
    device.run()
    wall_s = device.ttft_s(1)
    limit = min(share, 0.95)
    assert wall_s <= (1.0 + 0.03) / (1 - limit) + 0.03
    gaps = device.gaps(0, from_s=0.5, to_s=0.5 + wall_s)
    # Nor does it get less: a token every step_s / share, and a slice of waiting for the boundary.
    assert max(gaps) <= 0.03 / limit + SLICE_S + 1e-9


def test_a_step_takes_at_most_max_num_seqs_those_due_first_and_all_get_on() -> None:
    device = Device(make_scheduler("edf", max_num_seqs=2))
    # Three prefills overlap before any decodes, so three decode at once.
    device.submit(make_arrival(0, 0.00, num_prompt_tokens=300, ttft_slo_s=3))
    device.submit(make_arrival(1, 0.05, num_prompt_tokens=300, ttft_slo_s=2))
    device.submit(make_arrival(2, 0.10, num_prompt_tokens=300, ttft_slo_s=1))
    device.run()
    assert max(len(ran.req_ids) for ran in device.log if ran.is_step) == 2
    assert {len(device.token_times[req_id]) for req_id in range(3)} == {16}
    alone_s = device.token_times[0][0]  # request 0 is the last to end its prefill
    for req_id in range(3):
        assert max(device.gaps(req_id, alone_s)) <= 2 * STEP_S + 1e-9, "they do not take turns"


def test_a_step_that_leaves_sequences_out_is_not_repeated() -> None:
    scheduler = make_scheduler("edf", max_num_seqs=1)
    tasks = []
    for req_id in range(2):  # the second one preempts the first before it decodes
        arrival = make_arrival(req_id, ttft_slo_s=2.0 - req_id)
        tasks.append(prefill_of(scheduler.decide(0.0, [arrival])))
    decision = scheduler.decide(0.2, [PrefillDone(task.task_id) for task in tasks])
    assert step_of(decision) == DecodeStep((0,)) and decision.max_steps == 1
    assert scheduler.decide(0.21, [DecodeStepDone((0,), 0.21)]).task == DecodeStep((1,))


def test_a_step_is_predicted_from_the_tokens_cached_by_then() -> None:
    scheduler = make_scheduler(predictor=FixedRatePredictor(step_s_per_token=0.001))
    start_decoding(scheduler, 0, max_tokens=100)
    assert scheduler.decide(0.0, []).max_steps >= 15
    done = DecodeStepDone((0,), 1.0, num_steps=15)
    scheduler.decide(1.0, [done])
    step_s = STEP_S + 0.001 * (1 + 15)
    assert steps_beside(scheduler, 1.0).release_s == pytest.approx(
        1.0 + (1 - TBT_MARGIN) * 0.2 - step_s - SLICE_S
    )


def test_slack_counts_the_time_that_decode_takes_from_a_prefill() -> None:
    first = {}
    for step_s in (0.001, 0.1):  # a step takes 0.5% or half of the time
        scheduler = make_scheduler("s-edf", step_s=step_s)
        start_decoding(scheduler, 0)
        tight = make_arrival(1, num_prompt_tokens=1000, ttft_slo_s=1.2)
        roomy = make_arrival(2, num_prompt_tokens=1000, ttft_slo_s=3.0)
        first[step_s] = prefill_of(scheduler.decide(0.0, [tight, roomy])).req_ids
    assert first == {0.001: (1,), 0.1: (2,)}


def test_a_token_counts_from_the_end_of_its_step_not_from_the_decision() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)
    scheduler.decide(0.0, [])
    arrival = make_arrival(1, 4.9, num_prompt_tokens=2000)
    decision = scheduler.decide(5.0, [DecodeStepDone((0,), 4.8, num_steps=2), arrival])
    assert decision.steps is not None
    assert decision.steps.release_s == pytest.approx(4.8 + RELEASE_S)
