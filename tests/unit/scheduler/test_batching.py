"""Which waiting prompts join a short one that starts, and what becomes of a packed prefill."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import Arrival, Cancel, Finished, PrefillDone, PrefillParked
from flowprefill.scheduler.scheduler import Scheduler
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    FixedRatePredictor,
    document_keys,
    make_arrival,
    make_scheduler,
    pool_of,
    prefill_of,
    run_prefill,
    step_of,
)

SATURATION_TOKENS = 256


def make_packing(policy: str = "edf", **options: Any) -> Scheduler:
    return make_scheduler(
        policy, predictor=FixedRatePredictor(saturation_tokens=SATURATION_TOKENS), **options
    )


def shorts(num: int, num_prompt_tokens: int = 50, **fields: Any) -> list[Arrival]:
    return [make_arrival(i, num_prompt_tokens=num_prompt_tokens, **fields) for i in range(num)]


def first_pack(scheduler: Scheduler, arrivals: list[Arrival]) -> tuple[int, ...]:
    return prefill_of(scheduler.decide(0.0, arrivals)).req_ids


def test_short_waiting_prompts_are_packed_up_to_the_saturation_point() -> None:
    assert first_pack(make_packing(), shorts(9)) == (0, 1, 2, 3, 4)  # 250 of 256 tokens


def test_one_that_is_too_long_is_left_out_and_those_behind_it_join() -> None:
    arrivals = [*shorts(2), make_arrival(2, num_prompt_tokens=200), make_arrival(3)]
    assert first_pack(make_packing(), arrivals) == (0, 1, 3)


def test_a_chosen_prompt_at_the_saturation_point_runs_alone() -> None:
    arrivals = [make_arrival(0, num_prompt_tokens=SATURATION_TOKENS), *shorts(3)[1:]]
    assert first_pack(make_packing("fcfs"), arrivals) == (0,)


def test_max_pack_tokens_replaces_the_saturation_point() -> None:
    assert first_pack(make_packing(max_pack_tokens=120), shorts(9)) == (0, 1)
    assert first_pack(make_packing(max_pack_tokens=0), shorts(9)) == (0,)


def test_at_most_max_num_seqs_are_packed() -> None:
    assert first_pack(make_packing(max_num_seqs=3), shorts(9)) == (0, 1, 2)


def test_without_room_for_its_blocks_nobody_joins_and_nobody_loses_blocks_for_it() -> None:
    scheduler = make_packing(num_blocks=12)
    run_prefill(scheduler, make_arrival(9, num_prompt_tokens=10, max_tokens=6, ttft_slo_s=60))
    decision = scheduler.decide(0.0, shorts(9))  # 4 blocks each, 11 are free
    assert prefill_of(decision).req_ids == (0, 1)
    assert decision.evicted == ()


@pytest.mark.parametrize(
    ("ttft_slo_s", "pack"),
    [
        # 0.1 of the objective is kept: 0.9 x 0.23 is enough for four prompts of 50 ms.
        (0.23, (0, 1, 2, 3)),
        (0.22, (0, 1, 2)),
        (0.06, (0,)),
    ],
)
def test_the_chosen_keeps_a_tenth_of_its_objective_as_slack(
    ttft_slo_s: float, pack: tuple[int, ...]
) -> None:
    chosen = make_arrival(0, num_prompt_tokens=50, ttft_slo_s=ttft_slo_s)
    assert first_pack(make_packing(), [chosen, *shorts(9)[1:]]) == pack


def test_one_that_will_be_late_anyway_joins_no_pack_of_those_on_time() -> None:
    late = make_arrival(1, num_prompt_tokens=50, ttft_slo_s=0.01)
    arrivals = [shorts(1)[0], late, make_arrival(2, num_prompt_tokens=50)]
    assert first_pack(make_packing("s-edf"), arrivals) == (0, 2)


def test_a_late_chosen_may_be_packed() -> None:
    assert first_pack(make_packing(), shorts(9, ttft_slo_s=0.01)) == (0, 1, 2, 3, 4)


def test_a_pack_takes_the_predicted_time_of_the_pass() -> None:
    class Cheap(FixedRatePredictor):
        def packed_prefill_s(self, prompts: object) -> float:
            return 0.06

    scheduler = make_scheduler(predictor=Cheap(saturation_tokens=SATURATION_TOKENS))
    arrivals = [*shorts(3), make_arrival(9, num_prompt_tokens=1000, ttft_slo_s=60)]
    decision = scheduler.decide(0.0, arrivals)
    assert prefill_of(decision).req_ids == (0, 1, 2)
    assert decision.timer_s == pytest.approx(0.06 + 0.04)  # an overrun of at least 10 slices


def test_a_pack_alone_needs_no_timer() -> None:
    decision = make_packing().decide(0.0, shorts(4))
    assert len(prefill_of(decision).req_ids) == 4
    assert decision.timer_s is None


def test_every_member_has_its_token_at_the_end_of_the_pass_and_ends_by_itself() -> None:
    device = Device(make_packing())
    for req_id in range(4):
        device.submit(make_arrival(req_id, num_prompt_tokens=50, max_tokens=1 + 2 * req_id))
    device.run()
    assert [device.token_times[r][0] for r in range(4)] == [pytest.approx(0.2)] * 4
    assert [len(device.token_times[r]) for r in range(4)] == [1, 3, 5, 7]
    assert device.counters.prefills == 1
    assert pool_of(device.scheduler).num_used == 0


def test_members_of_a_parked_pack_resume_together() -> None:
    device = Device(make_packing())
    for req_id in range(4):
        device.submit(make_arrival(req_id, num_prompt_tokens=50, max_tokens=1, ttft_slo_s=5))
    device.submit(make_arrival(4, 0.101, num_prompt_tokens=40, max_tokens=1, ttft_slo_s=0.5))
    device.run()
    assert device.prefill_order() == [0, 4, 0]
    assert [device.token_times[r][0] for r in range(4)] == [pytest.approx(0.24)] * 4
    assert [device.records[r].num_preemptions for r in range(5)] == [1, 1, 1, 1, 0]
    assert device.scheduler.num_preemptions() == device.num_switches == 1


def test_when_one_member_is_cancelled_the_others_go_on_and_its_blocks_come_back_at_the_end() -> (
    None
):
    scheduler = make_packing(num_blocks=20)
    task = prefill_of(scheduler.decide(0.0, shorts(3)))
    blocks = pool_of(scheduler)
    assert blocks.num_used == 12
    decision = scheduler.decide(0.04, [PrefillParked(task.task_id, 0.1), Cancel(0)])
    after = prefill_of(decision)
    assert (after.task_id, after.req_ids) == (task.task_id, (1, 2))
    assert scheduler.status(0) is RequestStatus.FINISHED
    assert blocks.num_used == 12, "the pass still writes to them"
    scheduler.check_integrity()
    decision = scheduler.decide(0.15, [PrefillDone(task.task_id)])
    assert step_of(decision).req_ids == (1, 2)
    assert blocks.num_used == 8
    scheduler.check_integrity()


def test_when_all_members_are_cancelled_the_pass_is_dropped_and_all_blocks_come_back() -> None:
    scheduler = make_packing()
    task = prefill_of(scheduler.decide(0.0, shorts(3)))
    parked = PrefillParked(task.task_id, 0.1)
    scheduler.decide(0.04, [parked, Cancel(1)])
    assert scheduler.is_live(task.task_id)
    assert scheduler.decide(0.08, [parked, Cancel(0), Cancel(2)]).task is None
    assert not scheduler.is_live(task.task_id)
    pool_of(scheduler).check_integrity([])


def test_a_pack_is_evicted_as_a_whole_and_its_members_start_again() -> None:
    device = Device(make_packing(num_blocks=20))
    for req_id in range(3):
        device.submit(make_arrival(req_id, num_prompt_tokens=50, max_tokens=4, ttft_slo_s=5))
    device.send(0.05, Cancel(1))  # its blocks go with those of the pack
    device.submit(make_arrival(3, 0.101, num_prompt_tokens=210, max_tokens=4, ttft_slo_s=0.5))
    device.run()
    evicting = [d for _, d in device.decisions if d.evicted]
    assert [set(d.evicted) for d in evicting] == [{0, 2}]
    assert device.is_on_time(3)
    assert device.ended == {0: "finished", 1: "cancelled", 2: "finished", 3: "finished"}
    assert device.prefill_order() == [0, 3, 0, 2], "each as soon as there is room for it"
    assert [len(device.token_times[r]) for r in range(4)] == [4, 0, 4, 4]


def test_a_pack_with_a_member_more_urgent_than_the_newcomer_keeps_its_blocks() -> None:
    scheduler = make_packing("sjf", num_blocks=14)
    arrivals = [*shorts(2, ttft_slo_s=5), make_arrival(2, num_prompt_tokens=50, ttft_slo_s=1)]
    task = prefill_of(scheduler.decide(0.0, arrivals))
    assert sorted(task.req_ids) == [0, 1, 2]
    shorter = make_arrival(3, 0.01, num_prompt_tokens=40, ttft_slo_s=2)
    decision = scheduler.decide(0.05, [PrefillParked(task.task_id, 0.1), shorter])
    assert decision.evicted == ()
    assert decision.task == task


def test_a_resumed_stream_may_be_packed() -> None:
    scheduler = make_packing(num_blocks=12)
    run_prefill(scheduler, make_arrival(0, num_prompt_tokens=50))
    urgent = make_arrival(1, 0.1, num_prompt_tokens=150, max_tokens=1, ttft_slo_s=1)
    decision = scheduler.decide(0.1, [urgent])
    assert decision.evicted == (0,)
    done = [PrefillDone(prefill_of(decision).task_id), Finished(1)]
    newcomer = make_arrival(2, 0.2, num_prompt_tokens=50, ttft_slo_s=60)
    assert prefill_of(scheduler.decide(0.3, [*done, newcomer])).req_ids == (0, 2)


def test_what_is_cached_does_not_count_for_the_size_of_a_pack() -> None:
    scheduler = make_packing()
    keys = document_keys("d", 240)
    task = prefill_of(
        scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=240, prefix_keys=keys)])
    )
    scheduler.decide(0.3, [PrefillDone(task.task_id), Finished(0)])
    chosen = make_arrival(1, 1.0, num_prompt_tokens=250, prefix_keys=keys, ttft_slo_s=5)
    joining = make_arrival(2, 1.0, num_prompt_tokens=200)
    assert prefill_of(scheduler.decide(1.0, [chosen, joining])).req_ids == (1, 2)
