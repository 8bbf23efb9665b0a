"""Whatever arrives, is cancelled or runs late: no request is lost or run twice, blocks come back.

The Device of the scheduler's scenarios checks every decision: one place per request, blocks held
exactly and with the text that was looked for, timers in the future, no work after an end, no first
token twice, room for every step, never idle with work, the most urgent holder never evicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flowprefill.request import RequestStatus
from flowprefill.scheduler.ageing import PERIOD_S
from flowprefill.scheduler.events import Cancel, Drain
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import SWITCH_COST_S
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import (
    BLOCK_SIZE,
    SLICE_S,
    FixedRatePredictor,
    document_keys,
    make_arrival,
    make_scheduler,
    pool_of,
)

NUM_BLOCKS = 40
CAPACITY = NUM_BLOCKS * BLOCK_SIZE
policies = st.sampled_from(sorted(POLICIES))
short_times = st.floats(0, 0.6)
options = st.fixed_dictionaries(
    {
        "max_num_seqs": st.sampled_from([1, 3, 16]),
        "max_decode_share": st.sampled_from([0.2, 0.5, 1.0]),
        "starvation_share": st.sampled_from([0.0, 0.05, 0.3]),
        "reject_infeasible": st.booleans(),
        "fair_share": st.booleans(),
        "prefix_caching": st.booleans(),
    }
)
predictors = st.builds(
    FixedRatePredictor,
    step_s=st.sampled_from([0.01, 0.08]),
    step_s_per_token=st.sampled_from([0.0, 0.0001]),
    saturation_tokens=st.sampled_from([0, 200]),
)
shapes = st.fixed_dictionaries(
    {
        "num_prompt_tokens": st.one_of(st.integers(1, 80), st.integers(1, 500)),
        "max_tokens": st.integers(1, 100),
    }
)
objectives = st.fixed_dictionaries(
    {
        "ttft_slo_s": st.sampled_from([0.001, 0.1, 0.3, 2.0, 1000.0]),
        "tbt_slo_s": st.sampled_from([0.001, 0.05, 0.2, 1000.0]),
        "rank": st.sampled_from([0, 0, 0, 1, 2]),
        "weight": st.sampled_from([1.0, 1.0, 0.3, 5.0]),
        "tenant": st.sampled_from(["", "a", "b"]),
    }
)
Fields = dict[str, Any]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        policy=policies,
        predictor=predictors,
        options=options,
        slowness=st.sampled_from([0.5, 1.0, 3.0]),
    )
    def start(
        self, policy: str, predictor: FixedRatePredictor, options: Fields, slowness: float
    ) -> None:
        self.rejects = options["reject_infeasible"]
        scheduler = make_scheduler(policy, num_blocks=NUM_BLOCKS, predictor=predictor, **options)
        self.device = Device(scheduler, slowness=slowness)
        self.cancelled: set[int] = set()

    def submit(
        self,
        delay_s: float,
        share_generated: float,
        prefix_keys: tuple[Hashable, ...],
        **fields: Any,
    ) -> None:
        device = self.device
        arrival = make_arrival(
            len(device.records), device.now_s + delay_s, prefix_keys=prefix_keys, **fields
        )
        device.submit(arrival, max(1, round(share_generated * arrival.max_tokens)))

    @rule(
        delay_s=short_times,
        shape=shapes,
        objective=objectives,
        share_generated=st.floats(0, 1),
        document=st.sampled_from(["", "a", "b"]),
    )
    def arrive(
        self,
        delay_s: float,
        shape: Fields,
        objective: Fields,
        share_generated: float,
        document: str,
    ) -> None:
        keys = document_keys(document, shape["num_prompt_tokens"]) if document else ()
        self.submit(delay_s, share_generated, keys, **shape, **objective)

    @rule(
        delay_s=short_times,
        num=st.integers(2, 6),
        num_prompt_tokens=st.integers(1, 60),
        objective=objectives,
    )
    def arrive_together(
        self, delay_s: float, num: int, num_prompt_tokens: int, objective: Fields
    ) -> None:
        """Short ones with the same deadline: they are packed, where packing is on."""
        for _ in range(num):
            shape = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": 20}
            self.submit(delay_s, 1.0, (), **shape, **objective)

    @precondition(lambda self: self.device.records)
    @rule(delay_s=short_times, objective=objectives, data=st.data())
    def take_next_turn(self, delay_s: float, objective: Fields, data: st.DataObject) -> None:
        """The prompt continues an earlier prompt and what was generated for it."""
        req_id = data.draw(st.sampled_from(sorted(self.device.records)))
        known = self.device.written_keys(req_id)
        num_prompt_tokens = min(BLOCK_SIZE * len(known) + 20, CAPACITY - 20)
        keys = known[: num_prompt_tokens // BLOCK_SIZE]
        keys += ((known, len(self.device.records)),) * (num_prompt_tokens // BLOCK_SIZE - len(keys))
        shape = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": 20}
        self.submit(delay_s, 1.0, keys, **shape, **objective)

    @precondition(lambda self: self.device.records)
    @rule(delay_s=short_times, data=st.data())
    def cancel(self, delay_s: float, data: st.DataObject) -> None:
        """At any time from its arrival on."""
        req_id = data.draw(st.sampled_from(sorted(self.device.records)))
        arrival_s = self.device.records[req_id].arrival.arrival_s
        self.device.send(max(self.device.now_s + delay_s, arrival_s), Cancel(req_id))
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
        for req_id, record in self.device.records.items():
            assert record.ended, f"request {req_id} is lost"
            assert scheduler.status(req_id) is RequestStatus.FINISHED
            assert record.ended != "cancelled" or req_id in self.cancelled
            assert record.ended != "rejected" or self.rejects
            if record.ended == "finished":
                assert record.num_tokens == record.num_output_tokens
            assert len(self.device.token_times[req_id]) == record.num_tokens
        live = (scheduler.num_waiting, scheduler.num_prefilling, scheduler.num_decoding)
        assert live == (0, 0, 0)
        pool_of(scheduler).check_integrity([])
        self.switches_are_bounded_by_events_that_can_start_a_task()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


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
        running = ran.req_ids[0]
        for other in arrivals:
            was_there = other.arrival_s < ran.end_s - SLICE_S - 1e-9
            unfinished = device.token_times[other.req_id][0] > ran.end_s + 1e-9
            if was_there and unfinished:
                assert keys[running] <= keys[other.req_id] + SWITCH_COST_S


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
    assert len(device.token_times[0]) == 20
    # Due time, a slice, the step itself.
    assert max(device.gaps(0)) <= tbt_slo_s + SLICE_S + 0.01 + 1e-9


@settings(max_examples=25, deadline=None)
@given(
    policy=policies,
    share=st.sampled_from([0.05, 0.2]),
    gaps_s=st.lists(st.floats(0.02, 0.15), min_size=1, max_size=4),
    num_prompt_tokens=st.integers(1, 120),
    ttft_slo_s=st.sampled_from([0.001, 0.1, 0.5, 5.0]),
    rank=st.integers(0, 1),
    saturation_tokens=st.sampled_from([0, 200]),
)
def test_whatever_streams_past_it_the_one_that_is_late_longest_gets_its_share(
    policy: str,
    share: float,
    gaps_s: list[float],
    num_prompt_tokens: int,
    ttft_slo_s: float,
    rank: int,
    saturation_tokens: int,
) -> None:
    predictor = FixedRatePredictor(saturation_tokens=saturation_tokens)
    device = Device(make_scheduler(policy, starvation_share=share, predictor=predictor))
    late_s, duration_s = 0.1, 4 * PERIOD_S
    device.submit(make_arrival(0, num_prompt_tokens=3000, max_tokens=1, ttft_slo_s=late_s))
    arrival_s = 0.11
    for req_id, gap_s in enumerate(itertools.cycle(gaps_s), start=1):
        arrival_s += gap_s
        if arrival_s > late_s + duration_s:
            break
        device.submit(
            make_arrival(
                req_id,
                arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=1,
                ttft_slo_s=ttft_slo_s,
                rank=rank,
            )
        )
    device.run(until_s=late_s + duration_s)
    # Up to 2 x PERIOD_S before each stretch; only the time in which others run makes it owed.
    owed_s = share * (duration_s - 2 * PERIOD_S) / (1 + share)
    assert device.token_times[0] or device.prefill_s(0, from_s=late_s) >= 0.9 * owed_s


@settings(max_examples=40, deadline=None)
@given(
    policy=policies,
    share=st.sampled_from([0.0, 0.05, 0.2]),
    newcomers=st.lists(
        st.tuples(
            st.floats(0, 0.2),
            st.integers(1, 300),
            st.sampled_from([0.1, 0.3, 2.0]),
            st.sampled_from([1, 1, 30]),
        ),
        min_size=1,
        max_size=60,
    ),
)
def test_the_one_late_longest_loses_no_blocks_and_those_who_do_all_end(
    policy: str, share: float, newcomers: list[tuple[float, int, float, int]]
) -> None:
    device = Device(make_scheduler(policy, num_blocks=NUM_BLOCKS, starvation_share=share))
    device.submit(make_arrival(0, num_prompt_tokens=400, max_tokens=1, ttft_slo_s=0.1))
    arrival_s = 0.02
    for req_id, (gap_s, num_prompt_tokens, ttft_slo_s, max_tokens) in enumerate(newcomers, 1):
        arrival_s += gap_s
        device.submit(
            make_arrival(
                req_id,
                arrival_s,
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=max_tokens,
                ttft_slo_s=ttft_slo_s,
            )
        )
    device.run()
    assert all(0 not in decision.evicted for _, decision in device.decisions)
    assert set(device.ended.values()) == {"finished"}
