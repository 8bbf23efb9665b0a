"""Whatever arrives, is cancelled or runs late: no request is lost or run twice, blocks come back.

The Device of the scheduler's helpers checks every decision: one place per request, blocks held
exactly, timers in the future, no work after an end, no second prefill, never idle with work.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import Cancel, Drain
from flowprefill.scheduler.policy import POLICIES
from tests.unit.scheduler.helpers import SLICE_S, Device, make_arrival, make_scheduler

NUM_BLOCKS = 40
policies = st.sampled_from(sorted(POLICIES))
short_times = st.floats(0, 0.6)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=policies,
        max_num_seqs=st.integers(1, 3),
        max_decode_share=st.sampled_from([0.2, 0.5, 1.0]),
        queue_timeout_s=st.sampled_from([0.3, 5.0]),
        step_s=st.sampled_from([0.01, 0.08]),
        slowness=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def start(
        self,
        policy: str,
        max_num_seqs: int,
        max_decode_share: float,
        queue_timeout_s: float,
        step_s: float,
        slowness: float,
    ) -> None:
        scheduler = make_scheduler(
            policy,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=max_num_seqs,
            max_decode_share=max_decode_share,
            queue_timeout_s=queue_timeout_s,
            step_s=step_s,
        )
        self.device = Device(scheduler, slowness=slowness)
        self.submitted: list[int] = []
        self.cancelled: set[int] = set()

    @rule(
        delay_s=short_times,
        num_prompt_tokens=st.integers(1, 600),
        max_tokens=st.integers(1, 40),
        ttft_slo_s=st.sampled_from([0.001, 0.1, 0.3, 2.0, 1000.0]),
        tbt_slo_s=st.sampled_from([0.001, 0.05, 0.2, 1000.0]),
        data=st.data(),
    )
    def arrive(
        self,
        delay_s: float,
        num_prompt_tokens: int,
        max_tokens: int,
        ttft_slo_s: float,
        tbt_slo_s: float,
        data: st.DataObject,
    ) -> None:
        arrival = make_arrival(
            len(self.submitted),
            self.device.now_s + delay_s,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            ttft_slo_s=ttft_slo_s,
            tbt_slo_s=tbt_slo_s,
        )
        self.device.submit(arrival, data.draw(st.integers(1, max_tokens)))
        self.submitted.append(arrival.req_id)

    @precondition(lambda self: self.submitted)
    @rule(delay_s=short_times, data=st.data())
    def cancel(self, delay_s: float, data: st.DataObject) -> None:
        req_id = data.draw(st.sampled_from([*self.submitted, 999]))
        self.device.send(self.device.now_s + delay_s, Cancel(req_id))
        self.cancelled.add(req_id)

    @rule()
    def drain(self) -> None:
        self.device.send(self.device.now_s, Drain())

    @rule(duration_s=short_times)
    def run_for(self, duration_s: float) -> None:
        self.device.run(until_s=self.device.now_s + duration_s)

    @invariant()
    def switches_are_bounded_by_events_that_can_start_a_task(self) -> None:
        if hasattr(self, "device"):
            assert self.device.num_switches == self.device.scheduler.num_preemptions()
            assert self.device.num_switches <= self.device.num_start_events

    def teardown(self) -> None:
        if not hasattr(self, "device"):
            return
        self.device.run()
        scheduler = self.device.scheduler
        for req_id in self.submitted:
            assert req_id in self.device.ended, f"request {req_id} is lost"
            assert scheduler.status(req_id) is RequestStatus.FINISHED
            if self.device.ended[req_id] == "cancelled":
                assert req_id in self.cancelled
        live = (scheduler.num_waiting, scheduler.num_prefilling, scheduler.num_decoding)
        assert live == (0, 0, 0)
        scheduler._pool.check_integrity([])
        self.switches_are_bounded_by_events_that_can_start_a_task()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("policy", ["fcfs", "edf"])
@settings(max_examples=40, deadline=None)
@given(
    jobs=st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 500), st.floats(0.01, 3)), min_size=2, max_size=10
    )
)
def test_first_tokens_leave_in_policy_order_of_those_present(
    policy: str, jobs: list[tuple[float, int, float]]
) -> None:
    """When a prefill runs for more than a slice, nobody who was there ranks before it."""
    device = Device(make_scheduler(policy))
    arrivals = [
        make_arrival(i, t, num_prompt_tokens=n, max_tokens=1, ttft_slo_s=slo)
        for i, (t, n, slo) in enumerate(jobs)
    ]
    for arrival in arrivals:
        device.submit(arrival)
    device.run()
    keys = [a.arrival_s if policy == "fcfs" else a.arrival_s + a.ttft_slo_s for a in arrivals]
    for ran in device.log:
        running = ran.task.req_ids[0]
        for other in arrivals:
            was_there = other.arrival_s < ran.end_s - SLICE_S - 1e-9
            unfinished = device.token_times[other.req_id][0] > ran.end_s + 1e-9
            if was_there and unfinished:
                assert keys[running] <= keys[other.req_id]


@settings(max_examples=40, deadline=None)
@given(
    tbt_slo_s=st.sampled_from([0.05, 0.1, 0.3]),
    gaps_s=st.lists(st.floats(0.001, 0.1), min_size=30, max_size=60),
    num_prompt_tokens=st.integers(5, 60),
    slo_factor=st.floats(1.0, 3.0),
    policy=policies,
)
def test_urgent_prefills_never_delay_a_token_beyond_its_due_time_and_a_step(
    tbt_slo_s: float, gaps_s: list[float], num_prompt_tokens: int, slo_factor: float, policy: str
) -> None:
    device = Device(make_scheduler(policy))
    device.submit(make_arrival(0, num_prompt_tokens=1, max_tokens=20, tbt_slo_s=tbt_slo_s))
    arrival_s = 0.002
    for req_id, gap_s in enumerate(gaps_s, start=1):
        arrival_s += gap_s
        device.submit(
            make_arrival(
                req_id,
                arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=1,
                ttft_slo_s=slo_factor * num_prompt_tokens / 1000,
            )
        )
    device.run()
    times = device.token_times[0]
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert len(times) == 20
    assert max(gaps) <= tbt_slo_s + SLICE_S + 0.01 + 1e-9  # due time, a slice, the step itself
