"""Replay: a trace through the simulator on a modelled device, and who was on time.

The device is RooflineCost's Llama-3.1-8B on an A800. On time means the TTFT objective; token gaps
are in the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from flowprefill.granularity import Granularity
from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.events import Arrival, Decision, Event
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler, SchedulerOptions
from flowprefill.simulator.cost import NoisyPredictor
from flowprefill.simulator.roofline import RooflineCost, num_kv_tokens
from flowprefill.simulator.simulator import RequestRecord, Simulator
from flowprefill.workload import (
    PREFIX_BLOCK_TOKENS,
    Objective,
    TraceError,
    TraceRequest,
    objective,
    scale_rate,
    spread_ticks,
)

MAX_NUM_SEQS = 64
"""Sequences of a decode step, and prompts of a packed prefill."""


@cache
def roofline(granularity: Granularity) -> RooflineCost:
    """One for all replays of a process: it remembers the prompts that it has seen."""
    return RooflineCost(granularity)


@dataclass(frozen=True)
class Setup:
    """What is compared: how requests are ordered, where a prefill may be left."""

    policy: str
    granularity: Granularity
    error: float = 0.2
    """Prefills are predicted wrong by up to this share."""
    seed: int = 0
    """Of the errors."""


@dataclass(frozen=True)
class Target:
    """An attainment that a replay is to reach; it stops as soon as it no longer can."""

    attainment: float = 0.9
    every_class: bool = False
    """In each SLO class by itself."""


class Replay(Simulator):
    """One run over a trace. KV blocks are as long as the trace's prefix blocks."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        setup: Setup,
        slo_scale: float = 1.0,
        target: Target | None = None,
    ) -> None:
        cost = roofline(setup.granularity)
        predictor = NoisyPredictor(cost, setup.error, setup.seed)
        pool = BlockPool(num_kv_tokens() // PREFIX_BLOCK_TOKENS, PREFIX_BLOCK_TOKENS)
        max_pack_tokens = setup.granularity.pack_tokens(cost.saturation_tokens)
        options = SchedulerOptions(max_num_seqs=MAX_NUM_SEQS, max_pack_tokens=max_pack_tokens)
        scheduler = Scheduler(POLICIES[setup.policy], predictor, pool, options)
        super().__init__(scheduler, cost, predictor, setup.granularity)
        self.num_by_class: Counter[str] = Counter()
        self._missed: Counter[str] = Counter()
        self._target = target
        self._deadlines: list[tuple[float, str, RequestRecord]] = []
        self._num_counted = 0  # of the deadlines
        for req_id, request in enumerate(requests):
            self._submit(req_id, request, slo_scale)
        self._deadlines.sort(key=lambda item: item[0])

    def _submit(self, req_id: int, request: TraceRequest, slo_scale: float) -> None:
        goal = objective(request, slo_scale)
        self.submit(arrival_of(req_id, request, goal, PREFIX_BLOCK_TOKENS))
        self.num_by_class[goal.name] += 1
        deadline_s = request.arrival_s + goal.ttft_s
        self._deadlines.append((deadline_s, goal.name, self.records[req_id]))

    def run_all(self) -> Replay:
        """Run to the end, or until the target is out of reach."""
        self.run()
        if not self.is_stopped:
            self._count_missed(float("inf"))
        return self

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        self._count_missed(self.now_s)

    def _count_missed(self, now_s: float) -> None:
        """Look at everybody whose deadline has passed."""
        while self._num_counted < len(self._deadlines):
            deadline_s, name, record = self._deadlines[self._num_counted]
            if deadline_s >= now_s:
                return
            self._num_counted += 1
            if record.first_token_s > deadline_s:
                self._missed[name] += 1
                self.is_stopped = self._target is not None and not self.reaches(self._target)

    @property
    def attainment(self) -> float:
        """Share of the requests that were on time, or are not late yet."""
        return 1 - self._missed.total() / self.num_by_class.total()

    @property
    def attainment_by_class(self) -> dict[str, float]:
        return {
            name: 1 - self._missed[name] / number
            for name, number in sorted(self.num_by_class.items())
        }

    def reaches(self, target: Target) -> bool:
        """Whether the target is reached, or still can be."""
        if not target.every_class:
            return self.attainment >= target.attainment
        return min(self.attainment_by_class.values()) >= target.attainment

    @property
    def mean_ttft_s(self) -> float:
        return sum(record.ttft_s for record in self.records.values()) / len(self.records)


def arrival_of(req_id: int, request: TraceRequest, goal: Objective, block_tokens: int) -> Arrival:
    """A request of a trace as the scheduler sees it; block_tokens: those of a KV block."""
    return Arrival(
        req_id,
        request.arrival_s,
        request.input_tokens,
        request.output_tokens,
        goal.ttft_s,
        goal.tbt_s,
        prefix_keys=request.hashes_of_blocks(block_tokens)[: request.input_tokens // block_tokens],
    )


def offered_load(requests: Sequence[TraceRequest]) -> float:
    """Prefill seconds that arrive per second: each prompt alone, whole, nothing of it cached.

    1 = the device would just be busy all the time. Raises TraceError if all arrive at once.
    """
    cost = roofline(Granularity("whole"))
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if span_s == 0:
        raise TraceError(f"{len(requests)} requests that arrive at once have no rate to scale")
    work_s = sum(cost.prefill_s(request.input_tokens) for request in requests)
    return work_s / span_s


def at_load(requests: Sequence[TraceRequest], load: float) -> list[TraceRequest]:
    """The requests at the rate that offers `load`; see offered_load. Recorded ticks are spread."""
    spread = spread_ticks(requests)
    return scale_rate(spread, load / offered_load(spread))
