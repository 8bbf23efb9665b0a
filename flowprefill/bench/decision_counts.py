"""How often the scheduler decides over a trace, beside how often others would on the same run.

The trace is simulated (RooflineCost: Llama-3.1-8B on an A800) at `tile` granularity and LOAD_SHARE
of the load that the policy can take. Counted are:

ours            calls of Scheduler.decide().
per step        a scheduler that decides before each iteration, as those with chunked prefill do:
                one decision for each chunk of a prefill pass and for each decode step of the same
                run. Chunks of 512 and 2,048 tokens are the budgets of Sarathi-Serve (Agrawal et
                al., OSDI 2024) for tight and for relaxed objectives.
mixed steps     the same for a scheduler that mixes prefill and decode in an iteration, at its best:
                every chunk is filled to its last token, whatever prompts that takes, and of the
                decode steps only those count that ran while no prefill was there.
every boundary  a scheduler that decides wherever a task may be left: one decision for each slice of
                each prefill and decode step.

"Per step" favours us where prefills could share a chunk or decode tokens could ride in one; "mixed
steps" shows by how much. Both count the decode steps of our run, in which these wait as long as the
gaps between tokens allow while prefills run: a scheduler that does not wait has more of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from flowprefill.granularity import Granularity
from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.events import (
    Decision,
    DecodeStep,
    DecodeStepDone,
    Event,
    PrefillTask,
)
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler, SchedulerOptions
from flowprefill.simulator.cost import NoisyPredictor, Timeline
from flowprefill.simulator.measures import LOADS, bisect_last
from flowprefill.simulator.replay import (
    MAX_NUM_SEQS,
    Replay,
    Setup,
    Target,
    arrival_of,
    at_load,
    roofline,
)
from flowprefill.simulator.roofline import num_kv_tokens
from flowprefill.simulator.simulator import Simulator
from flowprefill.workload import PREFIX_BLOCK_TOKENS, TraceRequest, objective

CHUNK_TOKENS = (512, 2048)
"""Token budgets of the per-step schedulers."""
LOAD_SHARE = 0.8
"""The load at which decisions are counted, as a share of the highest at which 90% are on time."""
ENGINE_BLOCK_TOKENS = 16
"""The engine's default block size. Decode steps run without a decision only as long as the blocks
reach, so larger ones would flatter."""

_TILE = Granularity("tile")
_AFTER_S = 1e-7
"""Shorter than any slice."""


@dataclass(frozen=True)
class DecisionCounts:
    """Decisions per request of one simulated run; see the top of this file."""

    num_requests: int
    load: float
    attainment: float
    ours: float
    per_step: dict[int, float]
    """By tokens of a chunk."""
    mixed_steps: dict[int, float]
    every_boundary: float


def count_decisions(requests: Sequence[TraceRequest], policy: str) -> DecisionCounts:
    """Count over a trace at LOAD_SHARE of the highest load that the policy can take."""
    load = LOAD_SHARE * max_load(requests, policy)
    run = CountedRun(at_load(requests, load), policy)
    run.run()
    return run.counts(load)


def prefill_only(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, each with one output token."""
    return [replace(request, output_tokens=1) for request in requests]


def max_load(requests: Sequence[TraceRequest], policy: str) -> float:
    """The highest load at which 90% of the requests are on time; see replay.offered_load."""
    setup = Setup(policy, _TILE)

    def reaches(index: int) -> bool:
        replay = Replay(at_load(requests, LOADS[index]), setup, target=Target())
        return replay.run_all().reaches(Target())

    return LOADS[max(0, bisect_last(reaches, len(LOADS)))]


class CountedRun(Simulator):
    """A simulated run that counts what other schedulers would decide on it."""

    def __init__(self, requests: Sequence[TraceRequest], policy: str) -> None:
        cost = roofline(_TILE)
        predictor = NoisyPredictor(cost, Setup.error, Setup.seed)
        has_prefixes = any(request.prefix_hashes for request in requests)
        self._block_tokens = PREFIX_BLOCK_TOKENS if has_prefixes else ENGINE_BLOCK_TOKENS
        pool = BlockPool(num_kv_tokens() // self._block_tokens, self._block_tokens)
        options = SchedulerOptions(max_num_seqs=MAX_NUM_SEQS)
        scheduler = Scheduler(POLICIES[policy], predictor, pool, options)
        super().__init__(scheduler, cost, predictor, _TILE)
        self.pass_tokens: list[int] = []
        """Tokens that each started prefill pass computes."""
        self.num_prefill_slices = 0
        self.num_lone_steps = 0
        """Decode steps without a prefill that they would have to share the device with."""
        self._last_task_id = -1
        self._ran_lone_steps = False
        for req_id, request in enumerate(requests):
            self.submit(arrival_of(req_id, request, objective(request), self._block_tokens))

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        if self._ran_lone_steps:
            self.num_lone_steps += sum(
                event.num_steps for event in events if isinstance(event, DecodeStepDone)
            )
        task = decision.task
        self._ran_lone_steps = isinstance(task, DecodeStep)
        # Task ids ascend, so a larger one than before is a pass that starts.
        if isinstance(task, PrefillTask) and task.task_id > self._last_task_id:
            self._last_task_id = task.task_id
            self._start(task)

    def _start(self, task: PrefillTask) -> None:
        prompts = []
        for req_id in task.req_ids:
            record = self.records[req_id]
            num_tokens = record.arrival.num_prompt_tokens + record.num_tokens
            prompts.append((num_tokens, self.scheduler.num_cached_tokens(req_id)))
        self.pass_tokens.append(sum(end - start for end, start in prompts))
        self.num_prefill_slices += num_boundaries(roofline(_TILE).timeline(prompts, _TILE))

    def counts(self, load: float) -> DecisionCounts:
        """What was counted, per request; behind run()."""
        records = self.records.values()
        num_requests = len(records)
        num_steps = self.counters.decode_steps
        num_on_time = sum(r.ttft_s <= r.arrival.ttft_slo_s for r in records)
        total_tokens = sum(self.pass_tokens)
        num_slices = self.num_prefill_slices + num_steps * _step_boundaries()
        return DecisionCounts(
            num_requests=num_requests,
            load=load,
            attainment=num_on_time / num_requests,
            ours=self.scheduler.num_decisions / num_requests,
            per_step={
                size: (sum(math.ceil(n / size) for n in self.pass_tokens) + num_steps)
                / num_requests
                for size in CHUNK_TOKENS
            },
            mixed_steps={
                size: (math.ceil(total_tokens / size) + self.num_lone_steps) / num_requests
                for size in CHUNK_TOKENS
            },
            every_boundary=num_slices / num_requests,
        )


def num_boundaries(timeline: Timeline) -> int:
    """Slices of a task: its boundaries, the end included."""
    count, elapsed_s = 0, 0.0
    while elapsed_s < timeline.total_s:
        elapsed_s = timeline.next_boundary_s(elapsed_s + _AFTER_S)
        count += 1
    return count


@cache
def _step_boundaries() -> int:
    """Boundaries of a decode step: behind each operator, whatever the sequences."""
    return num_boundaries(roofline(_TILE).step_timeline(1, 1))
