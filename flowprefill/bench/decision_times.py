"""How long Scheduler.decide() takes while many requests wait.

The simulator's loop runs the scheduler on a device about as fast as two cores with the default
model, so the events are those of an engine: arrivals in the middle of prefills, ends, decode steps,
timers. Requests keep coming, so that the number that waits stays the same. Predictions come from
the engine's own FittedPredictor and garbage collection is on: an engine spends both too.

Times are CPU time of the thread, which other processes add little to, and wall time beside it.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flowprefill.granularity import Granularity
from flowprefill.kv.block_pool import BlockPool
from flowprefill.predictor.base import Predictor
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.programs.slices import SliceLimits
from flowprefill.scheduler.events import Arrival, Decision, Event
from flowprefill.scheduler.policy import POLICIES, Policy
from flowprefill.scheduler.scheduler import Scheduler, SchedulerOptions
from flowprefill.simulator.cost import LayerTimeline, Prompts, Stretch, Timeline
from flowprefill.simulator.simulator import Simulator
from flowprefill.workload import TraceRequest, objective

Deadlines = Literal["loose", "crowded", "late"]
DEADLINES: tuple[Deadlines, ...] = ("loose", "crowded", "late")
"""loose: all can be on time together; crowded: each can, but not all together; late: the trace's
own objectives, which most have missed while they waited."""
Mix = Literal["plain", "mixed", "scarce"]
MIXES: tuple[Mix, ...] = ("plain", "mixed", "scarce")
"""plain: nothing but lengths and objectives; mixed: ranks, shared prefixes, and fair share among
tenants as well; scarce: as mixed, with a KV cache in which the next prompt seldom finds room."""

WARM_UP_DECISIONS = 20
"""Not counted; the first takes in everybody who waits."""
MAX_PROMPT_TOKENS = 8_000
_BLOCK_TOKENS = 16
_NUM_BLOCKS = 1 << 17
_NUM_SCARCE_BLOCKS = 2048
"""Four requests of 8,192 tokens, as on a CPU by default."""
_NUM_RANKS = 3
_NUM_TENANTS = 8
_NUM_PREFIXES = 20
_PREFIX_BLOCKS = 32
_MAX_BLOCKS = MAX_PROMPT_TOKENS // _BLOCK_TOKENS
_MAX_SLICE_S = 0.004
_NUM_LAYERS = 30
_LIMITS = SliceLimits(tile_rows=512, attention_work=434_000)
_COEFFICIENTS = {
    "qkv": (2e-4, 3e-6),
    "attention": (5e-5, 0.0, 0.0, 4.6e-9),
    "mlp": (4e-4, 1.5e-5),
    "head": (1e-2, 1e-7),
    "decode_attention": (5e-5, 2e-6, 0.0, 1e-8),
    "logits": (6e-3, 1e-5),
}
"""About SmolLM2-135M on two cores. They set the pace of virtual time, nothing that is reported."""


@dataclass(frozen=True)
class Case:
    """A queue whose decisions are timed."""

    policy: str
    num_waiting: int
    deadlines: Deadlines
    mix: Mix


@dataclass(frozen=True)
class DecisionTimes:
    """Seconds of each timed decision."""

    cpu_s: Sequence[float]
    wall_s: Sequence[float]


def time_decisions(
    case: Case, requests: Sequence[TraceRequest], num_decisions: int, seed: int
) -> DecisionTimes:
    """Time so many decisions in a row; lengths and objectives are drawn from `requests`."""
    queue = SteadyQueue(case, requests, WARM_UP_DECISIONS + num_decisions, seed)
    queue.run()
    timed = queue.timed
    return DecisionTimes(timed.cpu_s[WARM_UP_DECISIONS:], timed.wall_s[WARM_UP_DECISIONS:])


class SteadyQueue(Simulator):
    """A simulated run in which as many requests come as start, for so many decisions."""

    def __init__(
        self, case: Case, requests: Sequence[TraceRequest], num_decisions: int, seed: int
    ) -> None:
        device = _Device(_COEFFICIENTS, _NUM_LAYERS, _LIMITS)
        num_blocks = _NUM_SCARCE_BLOCKS if case.mix == "scarce" else _NUM_BLOCKS
        pool = BlockPool(num_blocks, _BLOCK_TOKENS)
        options = SchedulerOptions(
            fair_share=case.mix != "plain",
            max_pack_tokens=device.saturation_tokens,  # found at load, as in an engine
        )
        self.timed = _TimedScheduler(POLICIES[case.policy], device, pool, options)
        super().__init__(self.timed, device, device, Granularity("tile"))
        self._case = case
        self._requests = requests
        self._num_decisions = num_decisions
        self._rng = random.Random(seed)
        self._req_ids = itertools.count()
        self._num_coming = 0
        lengths = [min(request.input_tokens, MAX_PROMPT_TOKENS) for request in requests]
        self._prefill_s = sum(map(device.prefill_s, lengths)) / len(lengths)
        self._queue_s = case.num_waiting * self._prefill_s  # to prefill all that wait
        for _ in range(case.num_waiting):
            waited_s = self._rng.uniform(0, self._queue_s) if case.deadlines == "late" else 0.0
            self._send(self.now_s - waited_s)

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        self._num_coming -= sum(isinstance(event, Arrival) for event in events)
        missing = self._case.num_waiting - self.timed.num_waiting - self._num_coming
        for _ in range(missing):  # at moments within the next prefill, as in a server
            self._send(self.now_s + self._rng.expovariate(1 / self._prefill_s))
        self.is_stopped = len(self.timed.cpu_s) >= self._num_decisions

    def _send(self, arrival_s: float) -> None:
        rng, case = self._rng, self._case
        request, req_id = rng.choice(self._requests), next(self._req_ids)
        num_tokens = min(request.input_tokens, MAX_PROMPT_TOKENS)
        goal = objective(request)
        slack_s = {
            "loose": rng.uniform(3, 6) * self._queue_s,  # decode steps take their share too
            "crowded": rng.uniform(0, 0.5) * self._queue_s,
            "late": 0.0,
        }
        is_mixed = case.mix != "plain"
        arrival = Arrival(
            req_id,
            arrival_s,
            num_tokens,
            request.output_tokens,
            goal.ttft_s + slack_s[case.deadlines],
            goal.tbt_s,
            rank=rng.randrange(_NUM_RANKS) if is_mixed else 0,
            tenant=str(rng.randrange(_NUM_TENANTS)) if is_mixed else "",
            prefix_keys=self._prefix_keys(req_id, num_tokens) if is_mixed else (),
        )
        self._num_coming += 1
        self.submit(arrival)

    def _prefix_keys(self, req_id: int, num_tokens: int) -> tuple[int, ...]:
        """One of a few beginnings, then blocks that nobody shares."""
        num_blocks = num_tokens // _BLOCK_TOKENS
        shared_id = -1 - self._rng.randrange(_NUM_PREFIXES)
        return tuple(
            (shared_id if block < _PREFIX_BLOCKS else req_id) * _MAX_BLOCKS + block
            for block in range(num_blocks)
        )


class _TimedScheduler(Scheduler):
    """Notes the time of each decision."""

    def __init__(
        self, policy: Policy, predictor: Predictor, pool: BlockPool, options: SchedulerOptions
    ) -> None:
        super().__init__(policy, predictor, pool, options)
        self.cpu_s: list[float] = []
        self.wall_s: list[float] = []

    def decide(self, now_s: float, events: Sequence[Event]) -> Decision:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        decision = super().decide(now_s, events)
        self.cpu_s.append(time.thread_time() - cpu_s)
        self.wall_s.append(time.perf_counter() - wall_s)
        return decision


class _Device(FittedPredictor):
    """Implements CostModel: a device that does as predicted, in equal slices."""

    def timeline(self, prompts: Prompts, granularity: Granularity) -> Timeline:
        return _in_slices(self.packed_prefill_s(prompts))

    def step_timeline(self, num_seqs: int, num_context_tokens: int) -> Timeline:
        return _in_slices(self.decode_step_s(num_seqs, num_context_tokens))


def _in_slices(total_s: float) -> Timeline:
    stretches = [Stretch(total_s, _MAX_SLICE_S)]
    return LayerTimeline(stretches, 0, stretches)
