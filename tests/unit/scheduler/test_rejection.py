"""on_infeasible: reject - who is turned away, and who never is."""

from __future__ import annotations

from typing import Any

from flowprefill.scheduler.events import PrefillDone, PrefillParked, Timer
from flowprefill.scheduler.scheduler import OVERRUN_FACTOR, Scheduler
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    make_arrival,
    make_scheduler,
    pool_of,
    prefill_of,
    run_prefill,
)


def make_rejecting(policy: str = "s-edf", **options: Any) -> Scheduler:
    return make_scheduler(policy, reject_infeasible=True, **options)


def test_a_waiting_request_that_will_be_late_is_rejected_while_others_run() -> None:
    device = Device(make_rejecting("fcfs"))
    device.submit(make_arrival(0, num_prompt_tokens=1000, max_tokens=1))
    device.submit(make_arrival(1, 0.1, num_prompt_tokens=100, max_tokens=1, ttft_slo_s=0.5))
    device.submit(make_arrival(2, 0.1, num_prompt_tokens=100, max_tokens=1, ttft_slo_s=5))
    device.run()
    assert device.ended == {0: "finished", 1: "rejected", 2: "finished"}
    assert device.prefill_order() == [0, 2]


def test_one_that_is_hopeless_at_its_arrival_is_rejected_at_once() -> None:
    scheduler = make_rejecting()
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=1000)]))
    hopeless = make_arrival(1, 0.1, num_prompt_tokens=500, ttft_slo_s=0.2)
    decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 0.9), hopeless])
    assert decision.rejected == (1,)
    assert decision.task == task
    assert scheduler.num_waiting == 0


def test_beside_a_stream_that_decodes_it_is_rejected_too() -> None:
    scheduler = make_rejecting()
    run_prefill(scheduler, make_arrival(0))
    hopeless = make_arrival(1, 0.1, num_prompt_tokens=500, ttft_slo_s=0.2)
    assert scheduler.decide(0.1, [hopeless]).rejected == (1,)


def test_where_all_are_hopeless_one_runs_before_the_others_are_rejected() -> None:
    """Nobody loses by it, and a run is what mends a wrong prediction."""
    scheduler = make_rejecting()
    hopeless = [make_arrival(i, num_prompt_tokens=500, ttft_slo_s=0.2) for i in range(3)]
    decision = scheduler.decide(0.0, hopeless)
    assert decision.rejected == ()
    task = prefill_of(decision)
    assert task.req_ids == (0,)
    decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 0.4), Timer()])
    assert decision.task == task
    assert decision.rejected == (1, 2)


def test_one_that_could_be_on_time_if_the_prediction_is_wrong_is_not_rejected() -> None:
    for ttft_slo_s, rejected in ((0.1 / OVERRUN_FACTOR + 0.001, ()), (0.079, (1,))):
        scheduler = make_rejecting("edf")
        scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=1000)])
        tight = make_arrival(1, 0.0, num_prompt_tokens=100, ttft_slo_s=ttft_slo_s)
        assert scheduler.decide(0.0, [tight]).rejected == rejected


def test_a_started_request_is_never_rejected() -> None:
    scheduler = make_rejecting("edf")
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0, ttft_slo_s=0.5)]))
    urgent = make_arrival(1, 0.05, num_prompt_tokens=300, ttft_slo_s=0.4)
    scheduler.decide(0.05, [PrefillParked(task.task_id, 0.05), urgent])
    decision = scheduler.decide(2.0, [Timer()])
    assert decision.rejected == ()
    assert scheduler.num_prefilling == 2


def test_a_resumed_stream_is_never_rejected() -> None:
    scheduler = make_rejecting(num_blocks=12)
    run_prefill(scheduler, make_arrival(0, ttft_slo_s=2))
    urgent = make_arrival(1, 0.1, num_prompt_tokens=150, ttft_slo_s=1)
    decision = scheduler.decide(0.1, [urgent])
    assert decision.evicted == (0,)
    decision = scheduler.decide(60.0, [PrefillDone(prefill_of(decision).task_id)])
    assert decision.rejected == ()
    assert scheduler.num_waiting == 1


def test_by_default_nobody_is_rejected() -> None:
    device = Device(make_scheduler("s-edf"))
    for req_id in range(20):
        device.submit(make_arrival(req_id, 0.01 * req_id, ttft_slo_s=0.11, max_tokens=2))
    device.run()
    assert set(device.ended.values()) == {"finished"}


def test_under_overload_those_that_are_served_are_on_time() -> None:
    device = Device(make_rejecting("goodput"))
    for req_id in range(100):  # twice what the device can do
        device.submit(make_arrival(req_id, 0.05 * req_id, max_tokens=1, ttft_slo_s=0.3))
    device.run()
    finished = [r for r, how in device.ended.items() if how == "finished"]
    assert len(device.ended) == 100
    assert len(finished) >= 45
    assert sum(map(device.is_on_time, finished)) >= 0.9 * len(finished)
    assert pool_of(device.scheduler).num_used == 0
