"""Predictions follow the measured speed of the device."""

from __future__ import annotations

import pytest

from flowprefill.scheduler.events import PrefillParked, Timer
from flowprefill.scheduler.scheduler import RESCALE_FROM, Scheduler
from tests.unit.scheduler.helpers import (
    FixedRatePredictor,
    make_arrival,
    make_scheduler,
    prefill_of,
)


def make_watched(policy: str = "s-edf") -> tuple[Scheduler, FixedRatePredictor]:
    predictor = FixedRatePredictor()
    return make_scheduler(policy, predictor=predictor), predictor


def test_what_waits_is_predicted_anew_when_the_device_gets_slower() -> None:
    for speed_factor, order in ((1.0, (1,)), (2.0, (2,))):
        scheduler, predictor = make_watched()
        arrivals = [
            make_arrival(0, num_prompt_tokens=100, ttft_slo_s=0.3),
            make_arrival(1, num_prompt_tokens=500, ttft_slo_s=0.8),  # feasible at full speed only
            make_arrival(2, num_prompt_tokens=100, ttft_slo_s=5.0),
        ]
        task = prefill_of(scheduler.decide(0.0, arrivals))
        assert task.req_ids == (0,)
        predictor.speed_factor = speed_factor
        parked = PrefillParked(task.task_id, 0.5)  # it will be late
        assert prefill_of(scheduler.decide(0.1, [parked, Timer()])).req_ids == order


def test_a_parked_prefill_is_predicted_anew() -> None:
    scheduler, predictor = make_watched("edf")
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=1000)]))
    urgent = make_arrival(1, 0.1, ttft_slo_s=1)
    scheduler.decide(0.1, [PrefillParked(task.task_id, 0.8), urgent])
    predictor.speed_factor = 0.5
    waiting = make_arrival(2, 0.1, ttft_slo_s=60)
    other = scheduler.decide(0.2, [waiting, Timer()])
    assert prefill_of(other).req_ids == (1,)
    assert scheduler._roster.requests[0].remaining_s == pytest.approx(0.4)


def test_what_is_reported_or_arrives_with_the_change_is_not_scaled_a_second_time() -> None:
    scheduler, predictor = make_watched("edf")
    arrivals = [make_arrival(0, num_prompt_tokens=1000), make_arrival(1, ttft_slo_s=60)]
    task = prefill_of(scheduler.decide(0.0, arrivals))
    predictor.speed_factor = 2.0
    newcomer = make_arrival(2, 0.1, num_prompt_tokens=100, ttft_slo_s=90)
    decision = scheduler.decide(0.1, [PrefillParked(task.task_id, 1.8), newcomer])
    assert decision.timer_s == pytest.approx(0.1 + 1.25 * 1.8)
    assert scheduler._roster.requests[1].remaining_s == pytest.approx(0.2)
    assert scheduler._roster.requests[2].remaining_s == pytest.approx(0.2)


def test_small_changes_add_up_and_are_followed_from_a_threshold_on() -> None:
    scheduler, predictor = make_watched("edf")
    scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=1000), make_arrival(1, ttft_slo_s=60)])
    waiting = scheduler._roster.requests[1]
    predictor.speed_factor = 1 + 0.7 * RESCALE_FROM
    scheduler.decide(0.1, [Timer()])
    assert waiting.remaining_s == pytest.approx(0.1)
    predictor.speed_factor = 1 + 1.4 * RESCALE_FROM
    scheduler.decide(0.2, [Timer()])
    assert waiting.remaining_s == pytest.approx(0.1 * (1 + 1.4 * RESCALE_FROM))


def test_a_change_while_nothing_runs_is_not_applied_to_what_arrives_later() -> None:
    scheduler, predictor = make_watched("edf")
    predictor.speed_factor = 2.0
    decision = scheduler.decide(
        0.0, [make_arrival(0, num_prompt_tokens=1000), make_arrival(1, ttft_slo_s=60)]
    )
    assert decision.timer_s == pytest.approx(1.25 * 2.0)
