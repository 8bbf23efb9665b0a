"""When decode steps run beside prefills, and who is in them."""

from __future__ import annotations

import itertools

import pytest

from flowprefill.scheduler.events import (
    DecodeStep,
    DecodeStepDone,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.scheduler import Scheduler
from tests.unit.scheduler.helpers import SLICE_S, STEP_S, Device, make_arrival, make_scheduler


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def start_decoding(scheduler: Scheduler, *req_ids: int, now_s: float = 0.0) -> None:
    for req_id in req_ids:
        decision = scheduler.decide(now_s, [make_arrival(req_id, now_s, num_prompt_tokens=1)])
        assert isinstance(decision.task, PrefillTask)
        scheduler.decide(now_s, [PrefillDone(decision.task.task_id)])


def test_a_step_runs_at_once_and_repeats_when_no_prefill_can_run() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0, 1)
    decision = scheduler.decide(0.0, [])
    assert decision.task == DecodeStep((0, 1))
    assert decision.repeat_decode and decision.timer_s is None


def test_steps_with_unchanged_membership_need_no_decision() -> None:
    device = Device(make_scheduler())
    device.submit(make_arrival(0, max_tokens=100))
    device.run()
    assert len(device.token_times[0]) == 100
    assert max(gaps(device.token_times[0])) == pytest.approx(STEP_S)
    assert device.scheduler.num_decisions <= 3  # arrival, first token, end


def test_beside_a_prefill_a_step_is_released_one_step_and_one_slice_before_its_token_is_due() -> (
    None
):
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)
    decision = scheduler.decide(0.0, [make_arrival(1, num_prompt_tokens=2000)])
    assert isinstance(decision.task, PrefillTask)
    release_s = 0.2 - STEP_S - SLICE_S
    assert decision.timer_s == pytest.approx(release_s)
    parked = PrefillParked(decision.task.task_id, 1.9)
    early = scheduler.decide(release_s - 0.01, [parked, Timer()])
    assert early.task == decision.task and early.timer_s == decision.timer_s
    at_release = scheduler.decide(release_s, [parked, Timer()])
    assert at_release.task == DecodeStep((0,))
    assert not at_release.repeat_decode
    after = scheduler.decide(release_s + STEP_S, [DecodeStepDone((0,))])
    assert after.task == decision.task
    assert after.timer_s == pytest.approx(release_s + STEP_S + release_s)


def test_all_tokens_are_on_time_during_a_long_prefill() -> None:
    device = Device(make_scheduler())
    device.submit(make_arrival(0, num_prompt_tokens=10, max_tokens=20))
    device.submit(make_arrival(1, 0.05, num_prompt_tokens=3000, max_tokens=1))
    device.run()
    assert len(device.token_times[0]) == 20
    assert max(gaps(device.token_times[0])) <= 0.2 + 1e-9
    assert device.token_times[1][0] <= 3.06 / (1 - STEP_S / 0.18) + 0.1


def test_an_urgent_prefill_that_would_miss_its_deadline_goes_before_the_step() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)  # its token is due at 0.2, the step released at 0.186
    urgent = make_arrival(1, 0.187, num_prompt_tokens=5, ttft_slo_s=0.009)
    decision = scheduler.decide(0.187, [urgent])
    assert isinstance(decision.task, PrefillTask)
    assert decision.timer_s == pytest.approx(0.2), "it may pass only until the token is due"


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
    arrival = make_arrival(1, 0.187, num_prompt_tokens=num_prompt_tokens, ttft_slo_s=ttft_slo_s)
    assert scheduler.decide(0.187, [arrival]).task == DecodeStep((0,))


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
    assert max(gaps(device.token_times[0])) <= 0.1 + SLICE_S + STEP_S + 1e-9


def test_a_newcomer_waits_for_a_slice_of_the_step_and_not_for_its_end() -> None:
    device = Device(make_scheduler(step_s=0.1, max_decode_share=0.25))
    device.submit(make_arrival(0, num_prompt_tokens=1, max_tokens=10, tbt_slo_s=0.5))
    device.submit(make_arrival(1, 0.15, num_prompt_tokens=50, max_tokens=1))
    device.run()
    assert device.ttft_s(1, 0.15) <= 0.05 + SLICE_S + 1e-9
    # The step that was left goes on where it was.
    assert device.token_times[0][-1] == pytest.approx(0.001 + 9 * 0.1 + 0.05)


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_decode_takes_at_most_its_share_from_a_waiting_prefill(share: float) -> None:
    device = Device(make_scheduler(max_decode_share=share, step_s=0.03))
    device.submit(make_arrival(0, num_prompt_tokens=1, max_tokens=500, tbt_slo_s=0.03))
    device.submit(make_arrival(1, 0.5, num_prompt_tokens=1000, max_tokens=1))
    device.run()
    wall_s = device.ttft_s(1, 0.5)
    limit = min(share, 0.95)
    assert wall_s <= (1.0 + 0.03) / (1 - limit) + 0.03
    beside = [t for t in device.token_times[0] if 0.5 <= t <= 0.5 + wall_s]
    # Nor does it get less: a token every step_s / share, and a slice of waiting for the boundary.
    assert max(gaps(beside)) <= 0.03 / limit + SLICE_S + 1e-9


def test_a_step_takes_at_most_max_num_seqs_those_due_first_and_all_get_on() -> None:
    scheduler = make_scheduler("edf", max_num_seqs=2)
    device = Device(scheduler)
    # Three prefills overlap before any decodes, so three decode at once.
    device.submit(make_arrival(0, 0.00, num_prompt_tokens=300, ttft_slo_s=3))
    device.submit(make_arrival(1, 0.05, num_prompt_tokens=300, ttft_slo_s=2))
    device.submit(make_arrival(2, 0.10, num_prompt_tokens=300, ttft_slo_s=1))
    device.run()
    steps = [ran.task.req_ids for ran in device.log if isinstance(ran.task, DecodeStep)]
    assert max(map(len, steps)) == 2
    assert {len(device.token_times[req_id]) for req_id in range(3)} == {16}
    alone_s = device.token_times[0][0]  # request 0 is the last to end its prefill
    for req_id in range(3):
        times = [t for t in device.token_times[req_id] if t >= alone_s]
        assert max(gaps(times)) <= 2 * STEP_S + 1e-9, "they do not take turns"


def test_a_step_that_leaves_sequences_out_is_not_repeated() -> None:
    scheduler = make_scheduler("edf", max_num_seqs=1)
    tasks = []
    for req_id in range(2):  # the second one preempts the first before it decodes
        arrival = make_arrival(req_id, ttft_slo_s=2.0 - req_id)
        tasks.append(scheduler.decide(0.0, [arrival]).task)
    done = [PrefillDone(task.task_id) for task in tasks if isinstance(task, PrefillTask)]
    decision = scheduler.decide(0.2, done)
    assert decision.task == DecodeStep((0,)) and not decision.repeat_decode
    assert scheduler.decide(0.21, [DecodeStepDone((0,))]).task == DecodeStep((1,))


def test_a_step_is_predicted_from_the_tokens_cached_by_then() -> None:
    scheduler = make_scheduler(step_s_per_token=0.001)
    start_decoding(scheduler, 0)
    assert scheduler.decide(0.0, []).repeat_decode
    steps = DecodeStepDone((0,), num_steps=20)
    decision = scheduler.decide(1.0, [steps, make_arrival(1, 1.0, num_prompt_tokens=2000)])
    step_s = STEP_S + 0.001 * (1 + 20)
    assert decision.timer_s == pytest.approx(1.0 + 0.2 - step_s - SLICE_S)


def test_slack_counts_the_time_that_decode_takes_from_a_prefill() -> None:
    first = {}
    for step_s in (0.001, 0.1):  # a step takes 0.5% or half of the time
        scheduler = make_scheduler("s-edf", step_s=step_s)
        start_decoding(scheduler, 0)
        tight = make_arrival(1, num_prompt_tokens=1000, ttft_slo_s=1.2)
        roomy = make_arrival(2, num_prompt_tokens=1000, ttft_slo_s=3.0)
        task = scheduler.decide(0.0, [tight, roomy]).task
        assert isinstance(task, PrefillTask)
        first[step_s] = task.req_ids
    assert first == {0.001: (1,), 0.1: (2,)}


def test_last_tokens_count_from_the_latest_report_of_repeated_steps() -> None:
    scheduler = make_scheduler()
    start_decoding(scheduler, 0)
    assert scheduler.decide(0.0, []).repeat_decode
    steps = [DecodeStepDone((0,))] * 2
    decision = scheduler.decide(5.0, [*steps, make_arrival(1, 5.0, num_prompt_tokens=2000)])
    assert isinstance(decision.task, PrefillTask)
    assert decision.timer_s == pytest.approx(5.0 + 0.2 - STEP_S - SLICE_S)
