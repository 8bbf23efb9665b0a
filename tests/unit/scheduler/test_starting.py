"""Who may start: KV blocks of the prompt, skipping over a heavy request, max_num_seqs."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import Cancel, Finished, PrefillParked
from flowprefill.scheduler.roster import MAX_SKIPS
from flowprefill.scheduler.scheduler import MAX_FITTING_TRIES, MAX_LOOKED_AT
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    FixedRatePredictor,
    document_keys,
    make_arrival,
    make_scheduler,
    pool_of,
    prefill_of,
    run_prefill,
)


def test_a_start_reserves_the_prompt_and_the_end_returns_all_blocks() -> None:
    scheduler = make_scheduler(num_blocks=10)
    task = prefill_of(
        scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=100, max_tokens=60)])
    )
    assert task.req_ids == (0,)
    assert len(scheduler.block_ids(0)) == 7  # 100 tokens in blocks of 16
    scheduler.decide(1.0, [Finished(0)])
    with pytest.raises(KeyError):
        scheduler.block_ids(0)
    pool_of(scheduler).check_integrity([])


def test_a_waiting_request_holds_no_blocks() -> None:
    scheduler = make_scheduler("fcfs")
    scheduler.decide(0.0, [make_arrival(0), make_arrival(1)])
    assert scheduler.status(1) is RequestStatus.WAITING
    assert scheduler.block_ids(1) == []
    assert (scheduler.num_waiting, scheduler.num_prefilling, scheduler.num_decoding) == (1, 1, 0)


def test_a_request_that_can_never_fit_is_our_own_error() -> None:
    with pytest.raises(AssertionError, match="can never fit"):
        make_scheduler(num_blocks=7).decide(0.0, [make_arrival(0, num_prompt_tokens=100)])


def test_light_requests_start_while_the_first_in_rank_waits_for_blocks() -> None:
    scheduler = make_scheduler("fcfs", num_blocks=20)
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=150, max_tokens=10))
    heavy = make_arrival(1, 0.01, num_prompt_tokens=200)
    light = make_arrival(2, 0.01, num_prompt_tokens=10, max_tokens=1, ttft_slo_s=20)
    assert prefill_of(scheduler.decide(0.02, [heavy, light])).req_ids == (2,)


def test_a_parked_prefill_goes_on_while_the_first_in_order_waits_for_blocks() -> None:
    scheduler = make_scheduler("fcfs", num_blocks=20)
    # The later of the two has the earlier deadline, so the first one takes no blocks from it.
    task = prefill_of(
        scheduler.decide(0.0, [make_arrival(0, 0.1, num_prompt_tokens=150, ttft_slo_s=1.0)])
    )
    first = make_arrival(1, 0.0, num_prompt_tokens=200)
    assert scheduler.decide(0.1, [PrefillParked(task.task_id, 0.05), first]).task == task


def submit_heavy_between_lights(device: Device, num_lights: int, **light_fields: Any) -> None:
    """Request 0 holds some of 40 blocks for 3 s; 1 needs 29 of them; lights arrive each 20 ms.

    Request 0 is the most urgent, so nobody takes its blocks.
    """
    device.submit(make_arrival(0, num_prompt_tokens=200, max_tokens=300, ttft_slo_s=1.0))
    device.submit(make_arrival(1, 0.1, num_prompt_tokens=464, max_tokens=16, ttft_slo_s=5.0))
    for i in range(num_lights):
        light = make_arrival(
            2 + i, 0.3 + 0.02 * i, num_prompt_tokens=10, max_tokens=1, **light_fields
        )
        device.submit(light)


def test_a_heavy_request_is_skipped_a_bounded_number_of_times() -> None:
    device = Device(make_scheduler("fcfs", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=200)
    device.run()
    order = device.prefill_order()
    assert order.index(1) - 1 == MAX_SKIPS
    assert sorted(order) == list(range(202)), "everyone is served"


def test_more_urgent_ones_start_before_an_overdue_request_and_preempt_it() -> None:
    device = Device(make_scheduler("fcfs", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=400, ttft_slo_s=0.1, rank=1)
    device.run()
    last_of_first, first_of_heavy = device.token_times[0][-1], device.token_times[1][0]
    lights = [device.token_times[r][0] for r in range(2, 402)]
    assert sum(t < last_of_first for t in lights) > 2 * MAX_SKIPS
    # Nor do those wait that come while it runs.
    assert sum(last_of_first < t < first_of_heavy for t in lights) > 0
    assert all(device.is_on_time(r) for r in range(2, 402))


def test_less_urgent_ones_do_not_start_before_an_overdue_request_although_more_urgent_ones_do() -> (
    None
):
    device = Device(make_scheduler("fcfs", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=200, ttft_slo_s=0.1, rank=1)
    less_urgent = range(300, 400)
    for i, req_id in enumerate(less_urgent):
        device.submit(make_arrival(req_id, 0.31 + 0.02 * i, num_prompt_tokens=10, max_tokens=1))
    device.run()
    first_of_heavy = device.token_times[1][0]
    before = [r for r in less_urgent if device.token_times[r][0] < first_of_heavy]
    assert 0 < len(before) < MAX_SKIPS, "the more urgent ones that skip it count as well"
    assert before == list(less_urgent[: len(before)])
    assert all(device.is_on_time(r) for r in range(2, 202))


def test_those_that_are_packed_count_as_starts() -> None:
    predictor = FixedRatePredictor(saturation_tokens=300)
    device = Device(make_scheduler("fcfs", num_blocks=60, max_num_seqs=30, predictor=predictor))
    device.submit(make_arrival(0, num_prompt_tokens=200, max_tokens=300, ttft_slo_s=1.0))
    device.submit(make_arrival(1, 0.1, num_prompt_tokens=800, max_tokens=16, ttft_slo_s=5.0))
    for req_id in range(2, 32):
        device.submit(make_arrival(req_id, 0.1, num_prompt_tokens=10, max_tokens=1))
    device.run(until_s=1.0)
    assert len(device.token_times) == 1 + MAX_SKIPS


def test_after_some_that_do_not_fit_those_that_hold_blocks_go_on() -> None:
    """Whether a prompt with keys fits is known only when it is tried; that bounds a decision."""
    for num_heavy, first in ((MAX_FITTING_TRIES - 1, (99,)), (MAX_FITTING_TRIES, (0,))):
        scheduler = make_scheduler("fcfs", num_blocks=20)
        holder = make_arrival(0, 0.1, num_prompt_tokens=150, ttft_slo_s=1.0)
        task = prefill_of(scheduler.decide(0.1, [holder]))
        heavy = [
            make_arrival(i, 0.01, num_prompt_tokens=200, prefix_keys=document_keys(f"d{i}", 200))
            for i in range(1, 1 + num_heavy)
        ]
        light = make_arrival(99, 0.02, num_prompt_tokens=10)
        decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 0.1), *heavy, light])
        assert prefill_of(decision).req_ids == first


def test_behind_many_that_do_not_fit_nobody_is_looked_for() -> None:
    """That bounds a decision; those that hold blocks go on."""
    for num_heavy, first in ((MAX_LOOKED_AT - 2, (999,)), (MAX_LOOKED_AT - 1, (0,))):
        scheduler = make_scheduler("fcfs", num_blocks=20)
        holder = make_arrival(0, 0.1, num_prompt_tokens=150, ttft_slo_s=1.0)
        task = prefill_of(scheduler.decide(0.1, [holder]))
        heavy = [make_arrival(i, 0.01, num_prompt_tokens=200) for i in range(1, 1 + num_heavy)]
        light = make_arrival(999, 0.02, num_prompt_tokens=10)
        decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 0.1), *heavy, light])
        assert prefill_of(decision).req_ids == first


def test_a_cancelled_overdue_request_holds_nobody_up() -> None:
    device = Device(make_scheduler("fcfs", num_blocks=40))
    submit_heavy_between_lights(device, num_lights=100)
    device.send(1.0, Cancel(1))
    device.run(until_s=2.9)
    assert len(device.token_times) == 1 + 100


def test_a_full_decode_step_keeps_no_newcomer_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=10))
    assert prefill_of(scheduler.decide(0.01, [make_arrival(1, 0.01)])).req_ids == (1,)


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
