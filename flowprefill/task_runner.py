"""TaskRunner: runs what was decided until it ends or something happens, and says what that means.

A prefill runs slice by slice, with the decode steps that are due beside it; at each boundary the
interrupt is looked at. Knows no scheduler beyond the vocabulary of its events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowprefill.clock import Clock
from flowprefill.errors import FlowPrefillError
from flowprefill.executor.executor import Executor, RunReport
from flowprefill.executor.sampler import Sampler
from flowprefill.interrupt import Interrupt
from flowprefill.kv.host_copies import to_device
from flowprefill.kv.prefix import prefix_keys
from flowprefill.passes import Pass, Passes
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.recorder import Recorder
from flowprefill.request import PrefillTiming
from flowprefill.request_book import LiveRequest, RequestBook
from flowprefill.scheduler.events import (
    Decision,
    DecodeStep,
    DecodeStepDone,
    Event,
    Finished,
    PacedSteps,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    has_end,
    merge,
)
from flowprefill.stats import EngineCounters


@dataclass
class TaskRunner:
    """Everything that the engine thread does on the device."""

    passes: Passes
    executor: Executor
    sampler: Sampler
    predictor: FittedPredictor
    book: RequestBook
    counters: EngineCounters
    clock: Clock
    prefix_caching: bool
    interrupt: Interrupt
    """Due: something happened that must be decided on."""
    recorder: Recorder | None = None
    """Notes what runs, from the next stretch of a pass on."""

    def run(self, decision: Decision, newcomers: set[int]) -> list[Event]:
        """Run the decided task until it ends or is left. Returns what the scheduler must know.

        newcomers: requests whose arrival the decision answered
        """
        if isinstance(decision.task, PrefillTask):
            return self._run_prefill(decision.task, decision.steps, newcomers)
        if isinstance(decision.task, DecodeStep):
            return self._run_steps(decision.task, decision.max_steps)
        return []

    # ---- tasks --------------------------------------------------------------------------------

    def _run_prefill(
        self, task: PrefillTask, steps: PacedSteps | None, newcomers: set[int]
    ) -> list[Event]:
        """Run the prefill, and decode steps beside it when they are due."""
        if not all([self.book.start(req_id) for req_id in task.req_ids]):
            return []  # one has been timed out, which the inbox tells
        # The first slice of a newcomer that takes the device from others ends their blocking time.
        blocked = newcomers.intersection(task.req_ids) if self._interrupts(task) else set()
        prefill = self.passes.prefill(task, self.book.live)
        if not prefill.busy_s:
            prefill.predicted_s = self._left_s(prefill)
        pace = _Pace(steps)
        stepped: list[Event] = []
        while True:
            if pace.is_due(self.clock.now_s()):
                stepped = merge(stepped, self._run_steps(pace.step, 1))
                pace.note_step(self.clock.now_s())
                if self.interrupt.is_due() or pace.is_over or has_end(stepped):
                    return [self._park(task, prefill), *stepped]
            report = self._run_pass(prefill, task.task_id, pace.next_s)
            self._note_times(task, prefill, blocked, report)
            blocked = set()
            if report.is_done:
                del self.passes.prefills[task.task_id]
                return [*stepped, PrefillDone(task.task_id), *self._sample(prefill)]
            if self.interrupt.is_due():
                return [self._park(task, prefill), *stepped]

    def _run_steps(self, step: DecodeStep, max_steps: int) -> list[Event]:
        """Run decode steps until one ends a request, max_steps have run, or something happens."""
        happened: list[Event] = []
        for _ in range(max_steps):
            decode = self.passes.decode(step, self.book.live)
            if not self._run_pass(decode).is_done:
                break
            self.passes.step = None
            ended = self._sample(decode)
            done = DecodeStepDone(decode.req_ids, self.clock.now_s())
            happened = merge(happened, [done, *ended])
            # A step that was left midway may have had other members than those that are due now.
            if ended or decode.req_ids != step.req_ids or self.interrupt.is_due():
                break
        return happened

    def _run_pass(
        self, one: Pass, task_id: int | None = None, until_s: float = math.inf
    ) -> RunReport:
        """Run a prefill, or a decode step, which has no task_id, until it is done or left."""
        recorder = self.recorder
        if recorder is None:
            report = self.executor.run(one.state, self.interrupt, until_s)
        else:
            watched = recorder.watch(task_id, one.req_ids, one.state)
            report = self.executor.run(watched, self.interrupt, until_s)
            recorder.note_run(watched, report)
        if report.is_done:  # else launched slices may still run, and busy_s would be too short
            self.predictor.observe(report.busy_s, report.profiled_s)
        return report

    def _park(self, task: PrefillTask, prefill: Pass) -> PrefillParked:
        return PrefillParked(task.task_id, self._left_s(prefill))

    def _left_s(self, prefill: Pass) -> float:
        """What is left of it, predicted."""
        profiled_s = prefill.state.remaining_s(self.predictor.profiled_s)
        return self.predictor.speed_factor * profiled_s

    def _interrupts(self, task: PrefillTask) -> bool:
        """Whether its start takes the device from a pass in progress."""
        return task.task_id not in self.passes.prefills and not self.passes.is_empty

    def _note_times(
        self, task: PrefillTask, prefill: Pass, blocked: set[int], report: RunReport
    ) -> None:
        """blocked: newcomers that preempt, whose blocking time ended when this stretch began"""
        if not prefill.busy_s:
            for req_id in task.req_ids:
                request = self.book.live[req_id]
                if request.first_slice_s is None:
                    request.first_slice_s = report.started_s
        for req_id in blocked:
            request = self.book.live[req_id]
            request.blocking_s = report.started_s - request.put_s
        prefill.busy_s += report.busy_s

    # ---- tokens -------------------------------------------------------------------------------

    def _sample(self, done: Pass) -> list[Finished]:
        """Choose and send the next token of each request. Returns those that ended with it."""
        live = self.book.live
        rows = [row for row, req_id in enumerate(done.req_ids) if req_id in live]
        members = [(done.req_ids[row], live[done.req_ids[row]]) for row in rows]
        logits = done.state.logits
        if len(rows) < len(done.req_ids):  # somebody was cancelled meanwhile
            logits = logits[to_device(rows, logits.device)]
        sampled = self.sampler.sample(logits, [request.sampling for _, request in members])
        now_s = self.clock.now_s()
        ended = []
        for (req_id, request), one in zip(members, sampled, strict=True):
            if one.error:
                self.book.fail(req_id, FlowPrefillError(one.error))
                ended.append(Finished(req_id))
                continue
            prefill = None
            if not request.sampling.output_token_ids:
                self._count_prefill(req_id, request)
                if recorder := self.recorder:
                    recorder.note_first_token(request.request, now_s)
                prefill = self._prefill_timing(done, req_id, request)
            if self.book.give_token(req_id, one, now_s, prefill):
                ended.append(Finished(req_id, self._written_keys(request)))
        return ended

    def _count_prefill(self, req_id: int, request: LiveRequest) -> None:
        self.counters.prefill_tokens += len(request.request.prompt_token_ids)
        self.counters.cached_tokens += self.passes.blocks.num_cached_tokens(req_id)

    def _prefill_timing(self, done: Pass, req_id: int, request: LiveRequest) -> PrefillTiming:
        assert request.first_slice_s is not None, "a token takes a slice"
        return PrefillTiming(
            started_s=request.first_slice_s,
            device_s=done.busy_s,
            predicted_s=done.predicted_s,
            num_cached_tokens=self.passes.blocks.num_cached_tokens(req_id),
            blocking_s=request.blocking_s,
        )

    def _written_keys(self, request: LiveRequest) -> tuple[bytes, ...]:
        """Keys of the full blocks that were written; the last token's K and V were not."""
        if not self.prefix_caching:
            return ()
        written = request.token_ids[:-1]
        return prefix_keys(written, self.passes.block_size, request.prefix_keys)


class _Pace:
    """When the next of the decode steps beside a prefill is due."""

    def __init__(self, steps: PacedSteps | None) -> None:
        self._steps = steps
        self._release_s = steps.release_s if steps else 0.0
        self._num_left = steps.max_steps if steps else 0

    @property
    def step(self) -> DecodeStep:
        assert self._steps is not None
        return self._steps.step

    @property
    def is_over(self) -> bool:
        return self._num_left == 0

    @property
    def next_s(self) -> float:
        """When the next step is due."""
        return self._release_s if self._num_left else math.inf

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.next_s

    def note_step(self, end_s: float) -> None:
        assert self._steps is not None
        self._num_left -= 1
        self._release_s = end_s + self._steps.interval_s
