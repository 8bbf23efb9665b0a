"""The engine's loop under a virtual clock: when tasks are left, what is reported, what it costs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Sequence

import pytest

from flowprefill.granularity import Granularity
from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.events import (
    Arrival,
    Cancel,
    Decision,
    DecodeStepDone,
    Event,
    PrefillDone,
    PrefillParked,
    Timer,
)
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler, SchedulerOptions
from flowprefill.simulator.cost import LayerTimeline, NoisyPredictor, Prompts, Stretch, Timeline
from flowprefill.simulator.roofline import RooflineCost
from flowprefill.simulator.simulator import RequestRecord, Simulator

OP = Granularity("op")
SLICE_S = 0.004
STEP_S = 0.01


class FixedRateCost:
    """1 ms per token, left every 4 ms (`whole`: never); a step takes 10 ms. Counts questions."""

    speed_factor = 1.0
    saturation_tokens = 1

    def __init__(self, slowness: float = 1.0) -> None:
        self._slowness = slowness
        self.num_boundaries_asked = 0

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        return (num_tokens - num_cached_tokens) * 0.001 * self._slowness

    def packed_prefill_s(self, prompts: Prompts) -> float:
        return sum(self.prefill_s(*prompt) for prompt in prompts)

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        return STEP_S * self._slowness

    def timeline(self, prompts: Prompts, granularity: Granularity) -> Timeline:
        total_s = self.packed_prefill_s(prompts)
        return self._sliced(total_s, total_s if granularity.kind == "whole" else SLICE_S)

    def step_timeline(self, num_seqs: int, num_context_tokens: int) -> Timeline:
        return self._sliced(self.decode_step_s(num_seqs, num_context_tokens), 0.001)

    def _sliced(self, total_s: float, slice_s: float) -> Timeline:
        cost = self

        class Counting(LayerTimeline):
            def next_boundary_s(self, elapsed_s: float) -> float:
                cost.num_boundaries_asked += 1
                return super().next_boundary_s(elapsed_s)

        stretches = [Stretch(total_s, slice_s)]
        return Counting(stretches, 0, stretches)


class Logged(Simulator):
    """Notes decisions and tokens, and checks the scheduler after each."""

    log: list[tuple[float, list[Event], Decision]]
    tokens: list[tuple[float, int]]

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        self.log.append((self.now_s, list(events), decision))
        self.scheduler.check_integrity()

    def on_token(self, record: RequestRecord) -> None:
        self.tokens.append((self.now_s, record.arrival.req_id))

    def events_of(self, kind: type[Event]) -> list[Event]:
        return [e for _, events, _ in self.log for e in events if isinstance(e, kind)]


def simulate(
    *,
    policy: str = "edf",
    granularity: Granularity = OP,
    num_blocks: int = 1000,
    slowness: float = 1.0,
    **options: float | bool,
) -> Logged:
    truth = FixedRateCost(slowness)
    predictor = FixedRateCost()
    scheduler = Scheduler(
        POLICIES[policy],
        predictor,
        BlockPool(num_blocks, 16),
        SchedulerOptions(max_slice_s=SLICE_S, **options),  # type: ignore[arg-type]
    )
    simulator = Logged(scheduler, truth, predictor, granularity)
    simulator.log, simulator.tokens = [], []
    return simulator


def arrival(
    req_id: int,
    arrival_s: float = 0.0,
    num_prompt_tokens: int = 100,
    max_tokens: int = 1,
    ttft_slo_s: float = 10.0,
    tbt_slo_s: float = 0.1,
    prefix_keys: tuple[Hashable, ...] = (),
) -> Arrival:
    return Arrival(
        req_id,
        arrival_s,
        num_prompt_tokens,
        max_tokens,
        ttft_slo_s,
        tbt_slo_s,
        prefix_keys=prefix_keys,
    )


def test_a_lone_prompt_takes_its_time_and_two_decisions() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.5))
    simulator.run()
    assert simulator.records[1].ttft_s == pytest.approx(0.1)
    assert simulator.records[1].ended == "finished"
    assert len(simulator.log) == 2


def test_an_urgent_arrival_preempts_at_the_next_boundary() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 1000))
    simulator.submit(arrival(2, 0.101, 50, ttft_slo_s=0.5))
    simulator.run()
    # 0.101 s lies between the boundaries at 0.100 and 0.104
    assert simulator.records[2].ttft_s == pytest.approx(0.104 + 0.05 - 0.101)
    assert simulator.records[1].ttft_s == pytest.approx(1.05)
    assert (simulator.records[1].num_preemptions, simulator.records[2].num_preemptions) == (1, 0)
    parked = simulator.events_of(PrefillParked)
    assert parked == [PrefillParked(0, pytest.approx(1.0 - 0.104))]


def test_a_whole_prefill_is_never_left() -> None:
    simulator = simulate(granularity=Granularity("whole"))
    simulator.submit(arrival(1, 0.0, 1000))
    simulator.submit(arrival(2, 0.101, 50, ttft_slo_s=0.5))
    simulator.run()
    assert simulator.records[2].ttft_s == pytest.approx(1.05 - 0.101)
    assert not simulator.events_of(PrefillParked)


def test_an_arrival_that_changes_nothing_lets_the_prefill_go_on() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 1000, ttft_slo_s=2.0))
    simulator.submit(arrival(2, 0.1, 50, ttft_slo_s=60.0))
    simulator.run()
    assert simulator.records[1].ttft_s == pytest.approx(1.0)
    assert simulator.records[1].num_preemptions == 0


def test_boundaries_are_asked_for_once_per_interruption() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 100_000 // 10))
    for i in range(5):
        simulator.submit(arrival(2 + i, 1.0 + i, 10, ttft_slo_s=0.5))
    simulator.run()
    assert isinstance(simulator._cost, FixedRateCost)
    assert simulator._cost.num_boundaries_asked <= 6
    assert all(record.ended == "finished" for record in simulator.records.values())


def test_a_lone_stream_decodes_without_further_decisions() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 100, max_tokens=50))
    simulator.run()
    record = simulator.records[1]
    assert record.num_tokens == 50
    assert record.last_token_s == pytest.approx(0.1 + 49 * STEP_S)
    assert record.max_gap_s == pytest.approx(STEP_S)
    assert len(simulator.log) <= 5
    assert sum(e.num_steps for e in simulator.events_of(DecodeStepDone)) == 49  # type: ignore[union-attr]


def test_steps_run_beside_a_prefill_when_they_are_due() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 100, max_tokens=20, tbt_slo_s=0.1))
    simulator.submit(arrival(2, 0.1, 2000))
    simulator.run()
    stream = [t for t, req_id in simulator.tokens if req_id == 1]
    gaps = [b - a for a, b in itertools.pairwise(stream)]
    assert max(gaps) <= 0.1 + 1e-9
    assert min(gaps) > 0.08  # just in time
    num_beside = sum(t <= simulator.records[2].first_token_s for t in stream) - 1
    assert simulator.records[2].ttft_s == pytest.approx(2.0 + num_beside * STEP_S, abs=STEP_S)
    assert len(simulator.log) <= 5


def test_an_event_leaves_a_step_that_goes_on_later() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 100, max_tokens=3, tbt_slo_s=1.0))
    simulator.submit(arrival(2, 0.1035, 20, ttft_slo_s=0.025))
    simulator.run()
    assert simulator.records[2].first_token_s == pytest.approx(0.104 + 0.02)
    # 4 ms of the first step had run.
    assert simulator.records[1].last_token_s == pytest.approx(0.1 + 2 * STEP_S + 0.02)
    assert simulator.counters.busy_s == pytest.approx(simulator.now_s)


def test_a_common_prefix_is_computed_once() -> None:
    simulator = simulate()
    keys = tuple(range(60))
    simulator.submit(arrival(1, 0.0, 1000, prefix_keys=keys))
    simulator.submit(arrival(2, 2.0, 1000, prefix_keys=(*keys[:50], *range(100, 112))))
    simulator.run()
    assert simulator.records[1].num_cached_tokens == 0
    assert simulator.records[2].num_cached_tokens == 800
    assert simulator.records[2].ttft_s == pytest.approx(0.2)


def test_an_evicted_stream_computes_prompt_and_tokens_again() -> None:
    # 25 blocks: the stream's 208 tokens in 13, and later too little for both.
    simulator = simulate(num_blocks=25)
    simulator.submit(arrival(1, 0.0, 200, max_tokens=100, tbt_slo_s=10.0))
    simulator.submit(arrival(2, 0.35, 300, ttft_slo_s=0.5))
    simulator.run()
    assert simulator.counters.evictions == 1
    assert simulator.records[2].ttft_s < 0.5
    stream = simulator.records[1]
    assert stream.num_tokens == 100
    generated_before = sum(
        t < simulator.records[2].first_token_s for t, i in simulator.tokens if i == 1
    )
    recomputed_s = (200 + generated_before) * 0.001
    # The recomputation gives a token, as a step does.
    steps_s = (100 - 2) * STEP_S
    busy_s = 0.2 + 0.3 + recomputed_s + steps_s
    assert simulator.counters.busy_s == pytest.approx(busy_s, abs=STEP_S)
    simulator.scheduler.check_integrity()


def test_a_cancelled_request_gets_no_more_tokens() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 1000))
    simulator.submit(arrival(2, 0.0, 100, max_tokens=100, ttft_slo_s=1.0))
    simulator.send(0.5, Cancel(1))
    simulator.send(0.7, Cancel(2))
    simulator.run()
    assert [r.ended for r in simulator.records.values()] == ["cancelled", "cancelled"]
    assert simulator.records[1].num_tokens == 0
    assert simulator.records[2].last_token_s < 0.7 + STEP_S
    assert simulator.now_s < 0.7 + STEP_S


def test_late_requests_are_rejected_where_the_options_say_so() -> None:
    simulator = simulate(reject_infeasible=True)
    simulator.submit(arrival(1, 0.0, 1000, ttft_slo_s=1.1))
    simulator.submit(arrival(2, 0.0, 1000, ttft_slo_s=1.2))
    simulator.submit(arrival(3, 0.5, 1000, ttft_slo_s=9.0))
    simulator.run()
    ends = [record.ended for record in simulator.records.values()]
    assert ends == ["finished", "rejected", "finished"]
    assert simulator.records[2].num_tokens == 0


def test_a_prediction_that_was_too_short_is_decided_upon_again() -> None:
    simulator = simulate(slowness=2.0)
    simulator.submit(arrival(1, 0.0, 1000, ttft_slo_s=1.5))
    simulator.submit(arrival(2, 0.0, 1000, ttft_slo_s=9.0))
    simulator.run()
    assert simulator.events_of(Timer)
    (first, *_) = simulator.events_of(PrefillParked)
    assert isinstance(first, PrefillParked)
    # Predicted: half of what is really left.
    assert first.remaining_s == pytest.approx((2.0 - 1.25) / 2, abs=SLICE_S)


def test_it_goes_on_until_the_given_time() -> None:
    simulator = simulate()
    simulator.submit(arrival(1, 0.0, 100))
    simulator.submit(arrival(2, 5.0, 100))
    simulator.run(until_s=1.0)
    assert [r.ended for r in simulator.records.values()] == ["finished", None]
    simulator.run()
    assert simulator.records[2].ended == "finished"


def random_run(seed: int, policy: str, granularity: str, num_blocks: int = 300) -> Logged:
    """60 requests of mixed lengths and objectives on a modelled A800, in a cache that is too small.

    Each has an integrity check after every decision.
    """
    draw = random.Random(seed)
    cost = RooflineCost(Granularity.parse(granularity))
    predictor = NoisyPredictor(cost, 0.2, seed)
    pool = BlockPool(num_blocks, 64)
    options = SchedulerOptions(max_num_seqs=4)
    scheduler = Scheduler(POLICIES[policy], predictor, pool, options)
    simulator = Logged(scheduler, cost, predictor, Granularity.parse(granularity))
    simulator.log, simulator.tokens = [], []
    time_s = 0.0
    for req_id in range(60):
        time_s += draw.expovariate(8.0)
        num_tokens = draw.choice([30, 300, 3000, 12_000])
        keys = tuple((draw.randrange(2), i) for i in range(num_tokens // 64))
        simulator.submit(
            Arrival(
                req_id,
                time_s,
                num_tokens,
                draw.randrange(1, 200),
                draw.choice([0.2, 1.0, 5.0]),
                draw.choice([0.05, 0.2]),
                prefix_keys=keys,
            )
        )
    simulator.run()
    assert pool.num_used == 0
    return simulator


@pytest.mark.parametrize(
    ("policy", "granularity"),
    [
        *((policy, "op") for policy in POLICIES),
        *(("s-edf", kind) for kind in ("whole", "chunk:512", "layer", "tile")),
    ],
)
def test_every_request_ends_with_all_its_tokens(policy: str, granularity: str) -> None:
    simulator = random_run(3, policy, granularity)
    for record in simulator.records.values():
        assert record.ended == "finished"
        assert record.num_tokens == record.arrival.max_tokens
        assert record.arrival.arrival_s < record.first_token_s <= record.last_token_s
    assert simulator.counters.busy_s <= simulator.now_s + 1e-6
    done = len(simulator.events_of(PrefillDone))
    assert simulator.counters.prefills == done


def test_the_same_trace_and_seed_give_the_same_event_log() -> None:
    first, second = random_run(1, "s-edf", "op"), random_run(1, "s-edf", "op")
    assert first.log == second.log
    assert first.tokens == second.tokens
    assert first.counters == second.counters
    assert random_run(2, "s-edf", "op").log != first.log
