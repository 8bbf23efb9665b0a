"""Which prefill runs, when it is switched for another, and what counts as a preemption."""

from __future__ import annotations

import pytest

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import (
    Cancel,
    Decision,
    DecodeStepDone,
    Drain,
    Finished,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import SWITCH_COST_S
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    SLICE_S,
    make_arrival,
    make_scheduler,
    pool_of,
    prefill_of,
    run_prefill,
    run_whole,
)

DEADLINE_POLICIES = ["edf", "s-edf", "goodput"]


def test_an_idle_scheduler_asks_for_nothing() -> None:
    assert make_scheduler().decide(0.0, []) == Decision(None)


@pytest.mark.parametrize("policy", ["sjf", "srpt", *DEADLINE_POLICIES])
def test_an_urgent_arrival_preempts_at_the_next_boundary_and_the_long_one_resumes(
    policy: str,
) -> None:
    device = Device(make_scheduler(policy))
    device.submit(make_arrival(0, num_prompt_tokens=7500, max_tokens=1, ttft_slo_s=60))
    device.submit(make_arrival(1, 2.001, num_prompt_tokens=64, max_tokens=1, ttft_slo_s=0.4))
    device.run()
    assert device.prefill_order() == [0, 1, 0]
    assert device.ttft_s(1) <= 0.064 + SLICE_S
    assert device.token_times[0] == [pytest.approx(7.5 + 0.064)]
    tasks = [d.task.task_id for _, d in device.decisions if isinstance(d.task, PrefillTask)]
    assert tasks[0] == tasks[-1], "resumed as a new task"


def test_under_fcfs_the_urgent_arrival_waits() -> None:
    device = Device(make_scheduler("fcfs"))
    device.submit(make_arrival(0, num_prompt_tokens=7500, max_tokens=1))
    device.submit(make_arrival(1, 2.0, num_prompt_tokens=64, max_tokens=1, ttft_slo_s=0.4))
    device.run()
    assert device.prefill_order() == [0, 1]
    assert device.scheduler.num_preemptions() == 0


def test_a_decision_for_the_same_prefill_is_no_preemption() -> None:
    scheduler = make_scheduler("edf")
    first = prefill_of(scheduler.decide(0.0, [make_arrival(0, ttft_slo_s=1.0)]))
    events = [PrefillParked(first.task_id, 0.06), make_arrival(1, 0.04, ttft_slo_s=5.0)]
    assert scheduler.decide(0.04, events).task == first
    assert scheduler.status(0) is RequestStatus.RUNNING
    assert scheduler.num_preemptions() == scheduler.num_preemptions(0) == 0


def test_a_switch_is_counted_once_at_the_displaced_request() -> None:
    scheduler = make_scheduler("edf")
    first = prefill_of(scheduler.decide(0.0, [make_arrival(0)]))
    events = [PrefillParked(first.task_id, 0.06), make_arrival(1, 0.04, ttft_slo_s=0.5)]
    second = prefill_of(scheduler.decide(0.04, events))
    assert second.req_ids == (1,)
    assert (scheduler.status(0), scheduler.status(1)) == (
        RequestStatus.PREEMPTED,
        RequestStatus.RUNNING,
    )
    counts = scheduler.num_preemptions(0), scheduler.num_preemptions(1), scheduler.num_preemptions()
    assert counts == (1, 0, 1)
    # The resume after the urgent one has ended is no preemption either.
    events_2 = [PrefillDone(second.task_id), Finished(1)]
    assert scheduler.decide(0.2, events_2).task == first
    assert scheduler.num_preemptions() == 1


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_equals_never_displace_each_other(policy: str) -> None:
    device = Device(make_scheduler(policy))
    for req_id in range(8):  # same size and deadline, all there at once
        device.submit(make_arrival(req_id, 0.0, num_prompt_tokens=300, max_tokens=1))
    for i in range(50):
        device.send(0.01 * i, Timer())
    device.run()
    assert device.prefill_order() == list(range(8))


@pytest.mark.parametrize("policy", DEADLINE_POLICIES)
@pytest.mark.parametrize(("gain", "order"), [(0.9, [0, 1]), (1.1, [0, 1, 0])])
def test_deadlines_closer_than_a_switch_costs_never_switch(
    policy: str, gain: float, order: list[int]
) -> None:
    device = Device(make_scheduler(policy))
    device.submit(make_arrival(0, num_prompt_tokens=1000, max_tokens=1, ttft_slo_s=5.0))
    ttft_slo_s = 4.5 - gain * SWITCH_COST_S
    device.submit(make_arrival(1, 0.5, num_prompt_tokens=500, max_tokens=1, ttft_slo_s=ttft_slo_s))
    device.run()
    assert device.prefill_order() == order


def test_srpt_keeps_a_prefill_that_is_nearly_done_while_sjf_switches() -> None:
    orders = {}
    for policy in ("srpt", "sjf"):
        device = Device(make_scheduler(policy))
        device.submit(make_arrival(0, num_prompt_tokens=1000, max_tokens=1))
        device.submit(make_arrival(1, 0.9, num_prompt_tokens=500, max_tokens=1))
        device.run()
        orders[policy] = device.prefill_order()
    assert orders == {"srpt": [0, 1], "sjf": [0, 1, 0]}


@pytest.mark.parametrize("policy", ["s-edf", "goodput"])
@pytest.mark.parametrize("rank", [0, 5])
def test_a_hopeless_newcomer_of_any_rank_never_displaces_one_that_is_on_time(
    policy: str, rank: int
) -> None:
    device = Device(make_scheduler(policy))
    device.submit(make_arrival(0, num_prompt_tokens=1000, max_tokens=1, ttft_slo_s=1.5))
    device.submit(
        make_arrival(1, 0.1, num_prompt_tokens=600, max_tokens=1, ttft_slo_s=0.5, rank=rank)
    )
    device.run()
    assert device.prefill_order() == [0, 1]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_at_equal_feasibility_a_higher_rank_preempts(policy: str) -> None:
    device = Device(make_scheduler(policy))
    device.submit(make_arrival(0, num_prompt_tokens=500, max_tokens=1, ttft_slo_s=2.0))
    # Later, longer and less urgent: nothing but its rank speaks for it.
    device.submit(make_arrival(1, 0.1, num_prompt_tokens=900, max_tokens=1, ttft_slo_s=5.0, rank=1))
    device.run()
    assert device.prefill_order() == [0, 1, 0]


def test_among_late_requests_a_higher_rank_goes_first() -> None:
    device = Device(make_scheduler("s-edf", starvation_share=0.0))
    device.submit(make_arrival(0, num_prompt_tokens=500, max_tokens=1, ttft_slo_s=0.1))
    for req_id, rank in ((1, 0), (2, 2), (3, 1)):
        device.submit(
            make_arrival(
                req_id, 0.2, num_prompt_tokens=300, max_tokens=1, ttft_slo_s=0.1, rank=rank
            )
        )
    device.run()
    assert device.prefill_order() == [0, 2, 3, 0, 1]


@pytest.mark.parametrize("policy", ["s-edf", "fcfs", "edf"])
def test_a_stream_of_late_requests_is_served_in_order_without_preemptions(policy: str) -> None:
    device = Device(make_scheduler(policy))
    for req_id in range(40):  # every one needs three times its objective
        device.submit(
            make_arrival(req_id, 0.05 * req_id, num_prompt_tokens=300, max_tokens=1, ttft_slo_s=0.1)
        )
    device.run()
    assert device.prefill_order() == list(range(40))
    assert device.num_switches == 0


def test_the_end_of_a_decode_step_alone_switches_no_prefill() -> None:
    """Time makes the current one late and another one not; only events may switch."""
    scheduler = make_scheduler("s-edf")
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=1, tbt_slo_s=0.1))
    arrivals = [
        make_arrival(1, 0.001, num_prompt_tokens=400, ttft_slo_s=0.5),  # the earlier deadline
        make_arrival(2, 0.001, num_prompt_tokens=400, ttft_slo_s=9.0),
    ]
    first = prefill_of(scheduler.decide(0.001, arrivals))
    assert first.req_ids == (1,)
    state = [PrefillParked(first.task_id, 0.4), DecodeStepDone((0,), 0.2)]
    assert scheduler.decide(0.2, state).task == first, "late by now"
    assert scheduler.num_preemptions() == 0
    second = prefill_of(scheduler.decide(0.2, [PrefillParked(first.task_id, 0.4), Timer()]))
    assert second.req_ids == (2,)
    assert scheduler.num_preemptions(1) == 1


def test_an_overrun_is_decided_upon_again_at_a_quarter_over_the_prediction() -> None:
    scheduler = make_scheduler("s-edf")
    events = [make_arrival(0, num_prompt_tokens=1000, ttft_slo_s=1.1), make_arrival(1)]
    decision = scheduler.decide(0.0, events)
    assert prefill_of(decision).req_ids == (0,)
    assert decision.timer_s == pytest.approx(1.25)
    # By then it is late, and the other one can still be on time.
    late = [PrefillParked(prefill_of(decision).task_id, 0.5), Timer()]
    assert prefill_of(scheduler.decide(1.25, late)).req_ids == (1,)


def test_the_time_of_steps_beside_a_prefill_is_no_overrun() -> None:
    scheduler = make_scheduler("edf", step_s=0.1)
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=1, tbt_slo_s=0.2))
    arrivals = [make_arrival(1, num_prompt_tokens=1000), make_arrival(2, ttft_slo_s=60)]
    decision = scheduler.decide(0.0, arrivals)
    assert prefill_of(decision).req_ids == (1,)
    assert decision.timer_s == pytest.approx(1.25 * 2.0)  # steps take half of the device


def test_a_prefill_alone_needs_no_timer() -> None:
    decision = make_scheduler().decide(0.0, [make_arrival(0, num_prompt_tokens=1000)])
    assert decision.timer_s is None


def test_a_prediction_of_nearly_nothing_does_not_decide_at_every_slice() -> None:
    scheduler = make_scheduler("s-edf")
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0, ttft_slo_s=1.0), make_arrival(1)]))
    decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 0.0), Timer()])
    assert decision.task == task
    assert decision.timer_s == pytest.approx(0.1 + 10 * SLICE_S)


def test_drain_changes_no_order() -> None:
    scheduler = make_scheduler("edf")
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0)]))
    events = [PrefillParked(task.task_id, 0.05), make_arrival(1, ttft_slo_s=0.5), Drain()]
    assert prefill_of(scheduler.decide(0.05, events)).req_ids == (1,)


def test_a_cancel_frees_the_blocks_in_any_state() -> None:
    scheduler = make_scheduler("edf", max_num_seqs=1)
    decoding = prefill_of(scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=10)]))
    parked = prefill_of(scheduler.decide(0.0, [make_arrival(1, ttft_slo_s=5)]))
    running = prefill_of(scheduler.decide(0.0, [make_arrival(2, ttft_slo_s=1)]))
    scheduler.decide(0.1, [PrefillDone(decoding.task_id), make_arrival(3)])
    statuses = [scheduler.status(req_id) for req_id in range(4)]
    assert statuses == [
        RequestStatus.DECODING,
        RequestStatus.PREEMPTED,
        RequestStatus.RUNNING,
        RequestStatus.WAITING,
    ]
    assert scheduler.is_live(parked.task_id) and scheduler.is_live(running.task_id)
    decision = scheduler.decide(0.1, [Cancel(req_id) for req_id in range(4)])
    assert decision == Decision(None)
    assert not scheduler.is_live(parked.task_id) and not scheduler.is_live(running.task_id)
    assert pool_of(scheduler).num_used == 0
    scheduler.check_integrity()


def test_unknown_and_ended_ids_are_ignored() -> None:
    scheduler = make_scheduler()
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0)]))
    scheduler.decide(0.1, [PrefillDone(task.task_id), Finished(0)])
    late = [Cancel(0), Finished(0), Cancel(99), PrefillDone(task.task_id), PrefillParked(7, 1.0)]
    assert scheduler.decide(0.2, late) == Decision(None)
    assert scheduler.status(0) is scheduler.status(99) is RequestStatus.FINISHED


def test_a_request_that_ends_with_its_first_token_never_decodes() -> None:
    assert run_whole(make_scheduler(), make_arrival(0, max_tokens=1)) == Decision(None)
    device = Device(make_scheduler())
    device.submit(make_arrival(0, max_tokens=1))
    device.run()
    assert len(device.token_times[0]) == 1
    assert not any(ran.is_step for ran in device.log)
