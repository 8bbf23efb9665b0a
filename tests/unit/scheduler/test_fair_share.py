"""Tenants with work waiting get equal numbers of tokens, whatever their deadlines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flowprefill.scheduler.events import (
    Cancel,
    DecodeStepDone,
    Finished,
    PrefillDone,
    PrefillParked,
)
from flowprefill.scheduler.fairness import QUANTUM_TOKENS
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler
from flowprefill.simulator.simulator import RequestRecord
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import make_arrival, make_scheduler, prefill_of, run_whole


def make_fair(policy: str = "edf", **options: Any) -> Scheduler:
    return make_scheduler(policy, fair_share=True, **options)


def submit_backlog(
    device: Device, tenant: str, num: int, arrival_s: float = 0.0, **fields: Any
) -> None:
    """Requests of one tenant, all at once."""
    first = len(device.records)
    for req_id in range(first, first + num):
        device.submit(make_arrival(req_id, arrival_s, tenant=tenant, max_tokens=1, **fields))


def served_tokens(device: Device, tenant: str, from_s: float, to_s: float) -> float:
    """Prompt tokens computed for a tenant within a stretch of time."""
    ids = [r for r, record in device.records.items() if record.arrival.tenant == tenant]
    return 1000 * sum(device.prefill_s(req_id, from_s, to_s) for req_id in ids)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_two_backlogged_tenants_get_equal_tokens(policy: str) -> None:
    device = Device(make_fair(policy))
    # Every policy would serve all of "urgent" first.
    submit_backlog(device, "urgent", 300, num_prompt_tokens=100, ttft_slo_s=50, rank=1)
    submit_backlog(device, "modest", 30, num_prompt_tokens=1000, ttft_slo_s=900)
    device.run(until_s=50.0)
    for to_s in range(5, 51, 5):
        served = [served_tokens(device, tenant, 0.0, to_s) for tenant in ("urgent", "modest")]
        assert abs(served[0] - served[1]) <= QUANTUM_TOKENS + 1000, to_s


def test_within_the_quantum_deadlines_decide() -> None:
    device = Device(make_fair())
    submit_backlog(device, "urgent", 10, num_prompt_tokens=100, ttft_slo_s=2)
    submit_backlog(device, "modest", 10, num_prompt_tokens=100, ttft_slo_s=100)
    device.run()
    assert device.prefill_order() == list(range(20))


def run_then_newcomer(device: Device, newcomer_s: float) -> tuple[float, float]:
    """Tenant "old" is alone for a while, then both are backlogged. Their tokens since then."""
    submit_backlog(device, "new", 60, newcomer_s, num_prompt_tokens=500, ttft_slo_s=50)
    submit_backlog(device, "old", 60, newcomer_s, num_prompt_tokens=500, ttft_slo_s=50)
    device.run(until_s=newcomer_s + 20.0)
    old, new = (
        served_tokens(device, tenant, newcomer_s, newcomer_s + 20) for tenant in ("old", "new")
    )
    return old, new


@pytest.mark.parametrize("num_before", [30, 10])
def test_an_idle_tenant_banks_no_credit(num_before: int) -> None:
    """Also when the device was idle before it comes, with 10 of 0.5 s each."""
    device = Device(make_fair())
    submit_backlog(device, "old", num_before, num_prompt_tokens=500)
    old, new = run_then_newcomer(device, newcomer_s=10.0)
    assert abs(old - new) <= QUANTUM_TOKENS + 500


def test_a_tenant_that_returns_banks_no_credit() -> None:
    device = Device(make_fair())
    submit_backlog(device, "new", 1, num_prompt_tokens=500)
    submit_backlog(device, "old", 15, 1.0, num_prompt_tokens=500)
    old, new = run_then_newcomer(device, newcomer_s=10.0)
    assert abs(old - new) <= QUANTUM_TOKENS + 500


class OneAtATime(Device):
    """A tenant "single" sends its next request as soon as the last one has ended."""

    def on_token(self, record: RequestRecord) -> None:
        super().on_token(record)
        arrival = record.arrival
        if arrival.tenant == "single":
            self.submit(replace(arrival, req_id=len(self.records), arrival_s=self.now_s))


def test_a_tenant_that_sends_one_request_at_a_time_keeps_its_debt() -> None:
    device = OneAtATime(make_fair())
    submit_backlog(device, "single", 1, num_prompt_tokens=400, ttft_slo_s=1.0)
    submit_backlog(device, "many", 60, num_prompt_tokens=400, ttft_slo_s=100)
    device.run(until_s=20.0)
    single, many = (served_tokens(device, tenant, 0.0, 20.0) for tenant in ("single", "many"))
    assert abs(single - many) <= QUANTUM_TOKENS + 400


def test_a_long_prompt_is_charged_as_it_progresses() -> None:
    scheduler = make_fair()
    task = prefill_of(scheduler.decide(0.0, [make_arrival(0, num_prompt_tokens=4000, tenant="a")]))
    for done_s, tokens in ((1.0, 1000), (3.0, 3000)):
        scheduler.decide(done_s, [PrefillParked(task.task_id, 4.0 - done_s)])
        assert scheduler.served_tokens() == {"a": pytest.approx(tokens)}
    scheduler.decide(4.0, [PrefillDone(task.task_id)])
    assert scheduler.served_tokens() == {"a": pytest.approx(4000)}


def test_a_long_prompt_of_one_that_is_ahead_is_left_for_others() -> None:
    device = Device(make_fair())
    submit_backlog(device, "long", 1, num_prompt_tokens=8000, ttft_slo_s=20)
    submit_backlog(device, "short", 40, 3.0, num_prompt_tokens=50, ttft_slo_s=60)
    device.run(until_s=4.0)
    # "short" starts even with the prompt's 3,000 tokens; from then on both are charged.
    ahead = served_tokens(device, "long", 3.0, 4.0) - served_tokens(device, "short", 3.0, 4.0)
    assert ahead <= QUANTUM_TOKENS
    assert device.prefill_order()[0] == 0


def test_generated_tokens_are_charged() -> None:
    scheduler = make_fair()
    arrival = make_arrival(0, num_prompt_tokens=100, tenant="a")
    task = prefill_of(scheduler.decide(0.0, [arrival]))
    scheduler.decide(0.1, [PrefillDone(task.task_id)])
    scheduler.decide(0.2, [DecodeStepDone((0,), 0.2, num_steps=5)])
    assert scheduler.served_tokens() == {"a": pytest.approx(105)}


def test_what_is_computed_again_after_an_eviction_is_not_charged_again() -> None:
    scheduler = make_fair(num_blocks=10)
    evicted = make_arrival(0, num_prompt_tokens=100, max_tokens=30, tenant="a")
    task = prefill_of(scheduler.decide(0.0, [evicted]))
    scheduler.decide(0.1, [PrefillDone(task.task_id)])
    scheduler.decide(0.2, [DecodeStepDone((0,), 0.2, num_steps=6)])
    urgent = make_arrival(1, 0.2, num_prompt_tokens=100, max_tokens=1, ttft_slo_s=1.0, tenant="b")
    decision = scheduler.decide(0.2, [urgent])
    assert decision.evicted == (0,)
    task = prefill_of(scheduler.decide(0.3, [PrefillDone(prefill_of(decision).task_id), Cancel(1)]))
    assert task.req_ids == (0,)
    scheduler.decide(0.4, [PrefillDone(task.task_id)])
    # 100 of the prompt, and of the 7 generated each once.
    assert scheduler.served_tokens() == {"a": pytest.approx(107)}


def test_cached_tokens_are_not_charged() -> None:
    scheduler = make_fair()
    keys = tuple(range(4))
    run_whole(scheduler, make_arrival(0, num_prompt_tokens=64, prefix_keys=keys, tenant="a"))
    again = make_arrival(1, num_prompt_tokens=64, prefix_keys=keys, tenant="b")
    waiting = make_arrival(2, num_prompt_tokens=64, ttft_slo_s=90, tenant="c")
    task = prefill_of(scheduler.decide(1.0, [waiting, again]))
    scheduler.decide(1.1, [PrefillDone(task.task_id)])
    served = scheduler.served_tokens()
    assert served["b"] - served["c"] == pytest.approx(16)


def test_off_by_default_tenants_change_no_decision() -> None:
    runs = []
    for tenants in (("", ""), ("a", "b")):
        device = Device(make_scheduler("edf"))
        submit_backlog(device, tenants[0], 60, num_prompt_tokens=100, ttft_slo_s=2)
        submit_backlog(device, tenants[1], 20, num_prompt_tokens=300, ttft_slo_s=100)
        device.run()
        assert device.scheduler.served_tokens() == {}
        runs.append(device.decisions)
    assert runs[0] == runs[1]


def test_a_single_tenant_is_served_as_without_fair_share() -> None:
    runs = []
    for fair_share in (False, True):
        device = Device(make_scheduler("s-edf", fair_share=fair_share))
        submit_backlog(device, "a", 30, num_prompt_tokens=100, ttft_slo_s=2)
        submit_backlog(device, "a", 10, 0.5, num_prompt_tokens=400, ttft_slo_s=1)
        device.run()
        runs.append(device.decisions)
    assert runs[0] == runs[1]


def test_tenants_that_have_gone_are_forgotten() -> None:
    scheduler = make_fair()
    for i in range(1000):
        arrival = make_arrival(i, float(i), num_prompt_tokens=10, max_tokens=1, tenant=f"t{i}")
        run_whole(scheduler, arrival, float(i))
    assert scheduler._fair_share is not None
    assert len(scheduler._fair_share._served) < 100


def test_a_tenant_in_debt_is_remembered_while_others_are_served() -> None:
    scheduler = make_fair()
    busy = make_arrival(0, num_prompt_tokens=9000, tenant="busy")
    stays = make_arrival(1, num_prompt_tokens=5000, ttft_slo_s=50, tenant="stays")
    task = prefill_of(scheduler.decide(0.0, [busy, stays]))
    scheduler.decide(9.0, [PrefillDone(task.task_id), Finished(0)])
    for i in range(2, 200):  # come and go at once
        scheduler.decide(9.0, [make_arrival(i, 9.0, tenant=f"t{i}"), Cancel(i)])
    scheduler.decide(9.0, [make_arrival(999, 9.0, tenant="busy")])
    served = scheduler.served_tokens()
    assert served["busy"] - served["stays"] == pytest.approx(9000)
