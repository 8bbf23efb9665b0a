"""Replay: a trace through the simulator on one modelled replica, and who was on time.

On time means the TTFT objective; token gaps are in the records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowprefill.granularity import Granularity
from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.events import Arrival, Decision, Event, PrefillTask
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler
from flowprefill.simulator.cost import NoisyPredictor
from flowprefill.simulator.platform import MAX_NUM_SEQS, PAPER_PLATFORM, Platform
from flowprefill.simulator.roofline import RooflineCost
from flowprefill.simulator.simulator import RequestRecord, Simulator
from flowprefill.workload import (
    Objective,
    TraceError,
    TraceRequest,
    objective,
    scale_rate,
    spread_ticks,
)

__all__ = ["MAX_NUM_SEQS", "Replay", "Setup", "Target", "at_load", "offered_load", "roofline"]


def roofline(granularity: Granularity) -> RooflineCost:
    """Of the paper's device and model."""
    return PAPER_PLATFORM.cost(granularity)


@dataclass(frozen=True)
class Setup:
    """What is compared: how requests are ordered, where a prefill may be left; and on what."""

    policy: str
    granularity: Granularity
    error: float = 0.2
    """Prefills are predicted wrong by up to this share."""
    seed: int = 0
    """Of the errors."""
    platform: Platform = PAPER_PLATFORM

    def predictor(self) -> NoisyPredictor:
        """What the scheduler believes."""
        return NoisyPredictor(self.platform.cost(self.granularity), self.error, self.seed)

    def scheduler(self, predictor: NoisyPredictor) -> Scheduler:
        """A new one, with a pool of its own."""
        pool = BlockPool(self.platform.num_blocks, self.platform.block_tokens)
        options = self.platform.options(self.granularity)
        return Scheduler(POLICIES[self.policy], predictor, pool, options)


@dataclass(frozen=True)
class Target:
    """An attainment that a replay is to reach; it stops as soon as it no longer can."""

    attainment: float = 0.9
    every_class: bool = False
    """In each SLO class by itself."""


class Replay(Simulator):
    """One run over a trace. KV blocks are as long as the prefix blocks of our trace files."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        setup: Setup,
        slo_scale: float = 1.0,
        target: Target | None = None,
        objectives: Sequence[Objective] | None = None,
    ) -> None:
        """objectives: of each request; None = workload.objective. slo_scale: times all of them."""
        predictor = setup.predictor()
        cost = setup.platform.cost(setup.granularity)
        super().__init__(setup.scheduler(predictor), cost, predictor, setup.granularity)
        self.num_by_class: Counter[str] = Counter()
        self.blocking_s: list[float] = []
        """Arrival to first slice, of newcomers that take the device from a pass in progress."""
        self._missed: Counter[str] = Counter()
        self._target = target
        self._deadlines: list[tuple[float, str, RequestRecord]] = []
        self._num_counted = 0  # of the deadlines
        goals = objectives or [objective(request) for request in requests]
        block_tokens = setup.platform.block_tokens
        for req_id, (request, goal) in enumerate(zip(requests, goals, strict=True)):
            self._submit(req_id, request, scaled(goal, slo_scale), block_tokens)
        self._deadlines.sort(key=lambda item: item[0])

    def _submit(
        self, req_id: int, request: TraceRequest, goal: Objective, block_tokens: int
    ) -> None:
        self.submit(arrival_of(req_id, request, goal, block_tokens))
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
        task = decision.task
        if not isinstance(task, PrefillTask) or not self.interrupts(task):
            return
        self.blocking_s += [
            self.now_s - event.arrival_s
            for event in events
            if isinstance(event, Arrival) and event.req_id in task.req_ids
        ]

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

    def records_by_class(self) -> dict[str, list[RequestRecord]]:
        """All requests, by SLO class."""
        found: dict[str, list[RequestRecord]] = {name: [] for name in sorted(self.num_by_class)}
        for _, name, record in self._deadlines:
            found[name].append(record)
        return found

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


def scaled(goal: Objective, scale: float) -> Objective:
    """The objective, its times multiplied by `scale`."""
    if scale == 1.0:
        return goal
    return replace(goal, ttft_s=goal.ttft_s * scale, tbt_s=goal.tbt_s * scale)


def arrivals_of(
    requests: Sequence[TraceRequest], goals: Sequence[Objective], block_tokens: int
) -> list[Arrival]:
    """All requests of a trace as the scheduler sees them, with their objectives."""
    return [
        arrival_of(req_id, request, goal, block_tokens)
        for req_id, (request, goal) in enumerate(zip(requests, goals, strict=True))
    ]


def offered_load(requests: Sequence[TraceRequest], platform: Platform = PAPER_PLATFORM) -> float:
    """Prefill seconds that arrive per second: each prompt alone, whole, nothing of it cached.

    1 = the replica would just be busy all the time. Raises TraceError if all arrive at once.
    """
    cost = platform.cost(Granularity("whole"))
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    if span_s == 0:
        raise TraceError(f"{len(requests)} requests that arrive at once have no rate to scale")
    work_s = sum(cost.prefill_s(request.input_tokens) for request in requests)
    return work_s / span_s


def rate_at_load_1(requests: Sequence[TraceRequest], platform: Platform = PAPER_PLATFORM) -> float:
    """Requests per second with which they offer a load of 1, see offered_load."""
    cost = platform.cost(Granularity("whole"))
    return len(requests) / sum(cost.prefill_s(request.input_tokens) for request in requests)


def at_load(
    requests: Sequence[TraceRequest], load: float, platform: Platform = PAPER_PLATFORM
) -> list[TraceRequest]:
    """The requests at the rate that offers `load`; see offered_load. Recorded ticks are spread."""
    spread = spread_ticks(requests)
    return scale_rate(spread, load / offered_load(spread, platform))
