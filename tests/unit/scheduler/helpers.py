"""Scenarios for the scheduler: factories, and a device whose times can be told in the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowprefill.granularity import Granularity
from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.events import (
    Arrival,
    Decision,
    DecodeStep,
    Finished,
    PrefillDone,
    PrefillTask,
)
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler, SchedulerOptions

TOKENS_PER_S = 1000.0
STEP_S = 0.01
SLICE_S = 0.004
BLOCK_SIZE = 16


@dataclass(frozen=True)
class SlicedTimeline:
    """Boundaries every SLICE_S, and at the end."""

    total_s: float
    is_step: bool = False

    def next_boundary_s(self, elapsed_s: float) -> float:
        num_slices = math.ceil(elapsed_s / SLICE_S - 1e-6)
        return min(num_slices * SLICE_S, self.total_s)


@dataclass
class FixedRatePredictor:
    """1 ms per prompt token, packed or not; a decode step a constant, and a rate per cached token.

    It is its own cost model: how long things take on a device of exactly that speed.
    """

    step_s: float = STEP_S
    step_s_per_token: float = 0.0
    saturation_tokens: int = 0
    """No packing by default."""
    speed_factor: float = 1.0

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        return self.speed_factor * (num_tokens - num_cached_tokens) / TOKENS_PER_S

    def packed_prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        return sum(self.prefill_s(*prompt) for prompt in prompts)

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        return self.speed_factor * (self.step_s + self.step_s_per_token * num_context_tokens)

    def timeline(
        self, prompts: Sequence[tuple[int, int]], granularity: Granularity
    ) -> SlicedTimeline:
        return SlicedTimeline(self.packed_prefill_s(prompts))

    def step_timeline(self, num_seqs: int, num_context_tokens: int) -> SlicedTimeline:
        return SlicedTimeline(self.decode_step_s(num_seqs, num_context_tokens), is_step=True)


def make_scheduler(
    policy: str = "s-edf",
    *,
    num_blocks: int = 1_000,
    predictor: FixedRatePredictor | None = None,
    step_s: float = STEP_S,
    **options: Any,
) -> Scheduler:
    """options: fields of SchedulerOptions."""
    return Scheduler(
        POLICIES[policy],
        predictor or FixedRatePredictor(step_s),
        BlockPool(num_blocks, BLOCK_SIZE),
        SchedulerOptions(**{"max_slice_s": SLICE_S, **options}),
    )


def make_arrival(
    req_id: int,
    arrival_s: float = 0.0,
    *,
    num_prompt_tokens: int = 100,
    max_tokens: int = 16,
    ttft_slo_s: float = 10.0,
    tbt_slo_s: float = 0.2,
    **fields: Any,
) -> Arrival:
    return Arrival(
        req_id, arrival_s, num_prompt_tokens, max_tokens, ttft_slo_s, tbt_slo_s, **fields
    )


def document_keys(name: str, num_tokens: int) -> tuple[tuple[str, int], ...]:
    """Keys of a prompt that is the beginning of a document."""
    return tuple((name, block) for block in range(num_tokens // BLOCK_SIZE))


def pool_of(scheduler: Scheduler) -> BlockPool:
    return scheduler._roster.memory._pool


def prefill_of(decision: Decision) -> PrefillTask:
    assert isinstance(decision.task, PrefillTask)
    return decision.task


def step_of(decision: Decision) -> DecodeStep:
    assert isinstance(decision.task, DecodeStep)
    return decision.task


def run_prefill(scheduler: Scheduler, arrival: Arrival, now_s: float = 0.0) -> Decision:
    """The request has its first token at `now_s` and decodes; nothing else ran before it."""
    task = prefill_of(scheduler.decide(now_s, [arrival]))
    assert task.req_ids == (arrival.req_id,)
    return scheduler.decide(now_s, [PrefillDone(task.task_id)])


def run_whole(scheduler: Scheduler, arrival: Arrival, now_s: float = 0.0) -> Decision:
    """The request has its only token at `now_s` and is gone."""
    task = prefill_of(scheduler.decide(now_s, [arrival]))
    assert task.req_ids == (arrival.req_id,)
    return scheduler.decide(now_s, [PrefillDone(task.task_id), Finished(arrival.req_id)])
