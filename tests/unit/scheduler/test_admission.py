"""Who may start: KV blocks, skipping over a heavy request, max_num_seqs, queue timeout."""

from __future__ import annotations

import pytest

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import (
    Cancel,
    Finished,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.scheduler import MAX_SKIPS, Scheduler
from tests.unit.scheduler.helpers import SLICE_S, STEP_S, Device, make_arrival, make_scheduler


def run_first_prefill(scheduler: Scheduler, *, num_prompt_tokens: int, max_tokens: int) -> None:
    """Request 0 holds its blocks and decodes."""
    arrival = make_arrival(0, num_prompt_tokens=num_prompt_tokens, max_tokens=max_tokens)
    task = scheduler.decide(0.0, [arrival]).task
    assert isinstance(task, PrefillTask)
    scheduler.decide(0.0, [PrefillDone(task.task_id)])


def test_a_start_reserves_prompt_and_answer_and_the_end_returns_them() -> None:
    scheduler = make_scheduler(num_blocks=10)
    run_first_prefill(scheduler, num_prompt_tokens=100, max_tokens=20)
    assert len(scheduler.block_ids(0)) == 8  # 120 tokens in blocks of 16
    scheduler.decide(1.0, [Finished(0)])
    with pytest.raises(KeyError):
        scheduler.block_ids(0)
    scheduler._pool.check_integrity([])


def test_a_waiting_request_holds_no_blocks() -> None:
    scheduler = make_scheduler("fcfs")
    scheduler.decide(0.0, [make_arrival(0), make_arrival(1)])
    assert scheduler.status(1) is RequestStatus.WAITING
    assert scheduler.block_ids(1) == []
    assert (scheduler.num_waiting, scheduler.num_prefilling, scheduler.num_decoding) == (1, 1, 0)


def test_a_request_that_can_never_fit_is_our_own_error() -> None:
    with pytest.raises(AssertionError, match="can never fit"):
        make_scheduler(num_blocks=2).decide(0.0, [make_arrival(0, num_prompt_tokens=100)])


def test_light_requests_start_while_the_first_in_rank_waits_for_blocks() -> None:
    scheduler = make_scheduler("fcfs", num_blocks=20)
    run_first_prefill(scheduler, num_prompt_tokens=150, max_tokens=10)
    heavy = make_arrival(1, 0.01, num_prompt_tokens=200)
    light = make_arrival(2, 0.02, num_prompt_tokens=10, max_tokens=1)
    task = scheduler.decide(0.02, [heavy, light]).task
    assert isinstance(task, PrefillTask) and task.req_ids == (2,)


def test_a_parked_prefill_goes_on_while_the_first_in_rank_waits_for_blocks() -> None:
    scheduler = make_scheduler("edf", num_blocks=20)
    task = scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=150)]).task
    assert isinstance(task, PrefillTask)
    urgent = make_arrival(1, 0.1, num_prompt_tokens=200, ttft_slo_s=1.0)
    assert scheduler.decide(0.1, [PrefillParked(task.task_id, 0.05), urgent]).task == task


def submit_heavy_between_lights(device: Device, num_lights: int, **light_kwargs: float) -> None:
    """Request 0 holds half of 40 blocks for 3 s; 1 needs 30 of them; lights arrive each 20 ms."""
    device.submit(make_arrival(0, num_prompt_tokens=10, max_tokens=300))
    device.submit(make_arrival(1, 0.1, num_prompt_tokens=464, max_tokens=16, ttft_slo_s=5.0))
    for i in range(num_lights):
        device.submit(
            make_arrival(2 + i, 0.2 + 0.02 * i, num_prompt_tokens=10, max_tokens=1, **light_kwargs)
        )


def test_a_heavy_request_is_skipped_a_bounded_number_of_times() -> None:
    device = Device(make_scheduler("fcfs", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=200)
    device.run()
    order = device.prefill_order()
    assert order.index(1) - 1 == MAX_SKIPS
    assert sorted(order) == list(range(202)), "everyone is served"


def test_even_more_urgent_ones_do_not_start_before_an_overdue_request_but_may_preempt_it() -> None:
    device = Device(make_scheduler("edf", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=200, ttft_slo_s=0.1)
    device.run()
    first_of_heavy = device.token_times[1][0]
    before = [r for r in range(2, 202) if device.token_times[r][0] < device.token_times[0][-1]]
    assert len(before) == MAX_SKIPS
    # Once it has its blocks they rank before it again.
    overtaken = [r for r in range(2, 202) if device.token_times[r][0] < first_of_heavy]
    assert len(overtaken) > MAX_SKIPS


def test_a_cancelled_overdue_request_holds_nobody_up() -> None:
    device = Device(make_scheduler("fcfs", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=100)
    device.send(1.0, Cancel(1))
    device.run(until_s=2.9)
    assert len(device.token_times) == 1 + 100


def test_a_full_decode_step_keeps_no_newcomer_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    run_first_prefill(scheduler, num_prompt_tokens=10, max_tokens=16)
    task = scheduler.decide(0.01, [make_arrival(1, 0.01)]).task
    assert isinstance(task, PrefillTask) and task.req_ids == (1,)


def test_parked_prefills_never_keep_an_urgent_newcomer_out() -> None:
    device = Device(make_scheduler("edf", max_num_seqs=1))
    for req_id in range(6):  # each more urgent than the ones before
        device.submit(
            make_arrival(req_id, 0.01 * req_id, num_prompt_tokens=100, ttft_slo_s=9 - req_id)
        )
    device.run(until_s=0.1)
    assert device.prefill_order() == [0, 1, 2, 3, 4, 5]
    device.run()
    assert set(device.ended.values()) == {"finished"}


@pytest.mark.parametrize("busy_with", ["prefill", "decode"])
def test_a_queue_timeout_fires_on_time_whatever_runs(busy_with: str) -> None:
    is_prefill = busy_with == "prefill"
    num_blocks = 1000 if is_prefill else 19  # all of them held by the one that decodes
    device = Device(make_scheduler("fcfs", num_blocks=num_blocks, queue_timeout_s=0.5))
    device.submit(
        make_arrival(
            0,
            num_prompt_tokens=3000 if is_prefill else 1,
            max_tokens=1 if is_prefill else 300,
        )
    )
    device.submit(make_arrival(1, 0.2))
    device.submit(make_arrival(2, 0.3))
    device.run()
    assert device.ended == {0: "finished", 1: "timed out", 2: "timed out"}
    delay_s = max(SLICE_S, STEP_S)
    assert 0.7 <= device.dropped_at[1] <= 0.7 + delay_s
    assert 0.8 <= device.dropped_at[2] <= 0.8 + delay_s


def test_a_started_request_never_times_out() -> None:
    device = Device(make_scheduler("edf", queue_timeout_s=0.5))
    device.submit(make_arrival(0, num_prompt_tokens=400))
    for req_id in range(1, 11):  # keep it parked for 4 s
        device.submit(
            make_arrival(req_id, 0.4 * req_id - 0.2, num_prompt_tokens=400, ttft_slo_s=1.0)
        )
    device.run()
    assert set(device.ended.values()) == {"finished"}
    assert device.token_times[0][0] > 4


def test_a_request_older_than_the_timeout_at_its_arrival_is_dropped_at_once() -> None:
    scheduler = make_scheduler(queue_timeout_s=0.5)
    assert scheduler.decide(1.0, [make_arrival(0, 0.1)]).timed_out == (0,)


def test_the_timer_is_that_of_the_oldest_request_still_waiting() -> None:
    scheduler = make_scheduler("fcfs", queue_timeout_s=0.5)
    arrivals = [make_arrival(0, num_prompt_tokens=9000), make_arrival(1, 0.1), make_arrival(2, 0.2)]
    decision = scheduler.decide(0.2, arrivals)
    assert decision.timer_s == pytest.approx(0.6)
    assert isinstance(decision.task, PrefillTask)
    parked = PrefillParked(decision.task.task_id, 8.0)
    assert scheduler.decide(0.3, [parked, Cancel(1)]).timer_s == pytest.approx(0.7)
    assert scheduler.decide(0.7, [parked, Timer()]).timed_out == (2,)
