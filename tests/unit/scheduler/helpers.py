"""Scenarios for the scheduler: factories, and a Device that plays the engine in virtual time."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from flowprefill.kv.block_pool import BlockPool
from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import (
    Arrival,
    Cancel,
    Decision,
    DecodeStep,
    DecodeStepDone,
    Event,
    Finished,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.policy import POLICIES
from flowprefill.scheduler.scheduler import Scheduler

TOKENS_PER_S = 1000.0
STEP_S = 0.01
SLICE_S = 0.004


class FixedRatePredictor:
    """A prefill takes 1 ms per token; a decode step a constant, and a rate per cached token."""

    def __init__(self, step_s: float = STEP_S, step_s_per_token: float = 0.0) -> None:
        self._step_s = step_s
        self._step_s_per_token = step_s_per_token

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        return (num_tokens - num_cached_tokens) / TOKENS_PER_S

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        return self._step_s + self._step_s_per_token * num_context_tokens


def make_scheduler(
    policy: str = "s-edf",
    *,
    num_blocks: int = 1_000,
    block_size: int = 16,
    max_num_seqs: int = 16,
    max_decode_share: float = 0.5,
    queue_timeout_s: float = 60.0,
    step_s: float = STEP_S,
    step_s_per_token: float = 0.0,
) -> Scheduler:
    return Scheduler(
        POLICIES[policy],
        FixedRatePredictor(step_s, step_s_per_token),
        BlockPool(num_blocks, block_size),
        max_num_seqs=max_num_seqs,
        max_slice_s=SLICE_S,
        max_decode_share=max_decode_share,
        queue_timeout_s=queue_timeout_s,
    )


def make_arrival(
    req_id: int,
    arrival_s: float = 0.0,
    *,
    num_prompt_tokens: int = 100,
    max_tokens: int = 16,
    ttft_slo_s: float = 10.0,
    tbt_slo_s: float = 0.2,
) -> Arrival:
    return Arrival(req_id, arrival_s, num_prompt_tokens, max_tokens, ttft_slo_s, tbt_slo_s)


@dataclass(frozen=True)
class Ran:
    """One stretch of device time."""

    task: PrefillTask | DecodeStep
    start_s: float
    end_s: float


class Device:
    """Runs a scheduler's decisions as the engine does, in virtual time, and checks each of them.

    slowness: device time over predicted time. What a request generates is `num_output_tokens` of
    `submit`; the device reports its end.
    """

    def __init__(self, scheduler: Scheduler, *, slowness: float = 1.0) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.log: list[Ran] = []
        self.token_times: defaultdict[int, list[float]] = defaultdict(list)
        self.arrived: set[int] = set()
        self.dropped_at: dict[int, float] = {}
        self.ended: dict[int, str] = {}
        self.num_start_events = 0
        self.num_switches = 0
        self._slowness = slowness
        self._inbox: list[tuple[float, Event]] = []
        self._reports: list[Event] = []
        self._timer_s: float | None = None
        self._remaining_s: dict[int, float] = {}
        self._num_outputs: dict[int, int] = {}
        self._prompt_s: dict[int, float] = {}
        self._last_prefill: int | None = None
        self._parked_step: tuple[DecodeStep, float] | None = None  # left midway, seconds to go

    def submit(self, arrival: Arrival, num_output_tokens: int | None = None) -> None:
        self._num_outputs[arrival.req_id] = num_output_tokens or arrival.max_tokens
        self._prompt_s[arrival.req_id] = arrival.num_prompt_tokens / TOKENS_PER_S * self._slowness
        self.send(max(arrival.arrival_s, self.now_s), arrival)

    def send(self, time_s: float, event: Event) -> None:
        self._inbox.append((time_s, event))
        self._inbox.sort(key=lambda item: item[0])

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing is left to do, or until the first boundary at or after `until_s`."""
        while self.now_s < until_s and self._wait_for_event():
            self._run_task(self._decide())

    def ttft_s(self, req_id: int, arrival_s: float) -> float:
        return self.token_times[req_id][0] - arrival_s

    def prefill_order(self) -> list[int]:
        """Requests in the order in which their prefills got the device, repeats merged."""
        order: list[int] = []
        for ran in self.log:
            if isinstance(ran.task, PrefillTask) and order[-1:] != [ran.task.req_ids[0]]:
                order.append(ran.task.req_ids[0])
        return order

    # ---- the engine's part --------------------------------------------------------------------

    def _wait_for_event(self) -> bool:
        if self._reports:
            return True
        next_s = self._next_interrupt_s()
        if next_s == math.inf:
            return False
        self.now_s = max(self.now_s, next_s)
        return True

    def _next_interrupt_s(self) -> float:
        inbox_s = self._inbox[0][0] if self._inbox else math.inf
        return min(inbox_s, math.inf if self._timer_s is None else self._timer_s)

    def _decide(self) -> Decision:
        events, self._reports = self._reports, []
        if self._timer_s is not None and self._timer_s <= self.now_s:
            events.append(Timer())
        while self._inbox and self._inbox[0][0] <= self.now_s:
            events.append(self._inbox.pop(0)[1])
        for event in events:
            if isinstance(event, Arrival):
                self.arrived.add(event.req_id)
            elif isinstance(event, Cancel) and event.req_id in self.arrived:
                self.ended.setdefault(event.req_id, "cancelled")
        decision = self.scheduler.decide(self.now_s, events)
        state = (PrefillParked, DecodeStepDone)
        self.num_start_events += sum(not isinstance(event, state) for event in events)
        self._timer_s = decision.timer_s
        for req_id in decision.timed_out:
            assert req_id not in self.ended and not self.token_times[req_id]
            self.ended[req_id] = "timed out"
            self.dropped_at[req_id] = self.now_s
            self.num_start_events += 1
        if self._parked_step and self.ended.keys() & set(self._parked_step[0].req_ids):
            self._parked_step = None  # the blocks of a member are gone; the others run again
        self._check(decision)
        return decision

    def _check(self, decision: Decision) -> None:
        self.scheduler.check_integrity()
        assert decision.timer_s is None or decision.timer_s > self.now_s, "timer in the past"
        if decision.task is None:
            assert self.scheduler.num_waiting + self.scheduler.num_decoding == 0, "idle with work"
            return
        for req_id in decision.task.req_ids:
            assert req_id not in self.ended, f"request {req_id} runs after its end"
            assert self.scheduler.block_ids(req_id), f"request {req_id} runs without blocks"
        if isinstance(decision.task, PrefillTask):
            (req_id,) = decision.task.req_ids
            assert not self.token_times[req_id], f"request {req_id} is prefilled twice"
            assert self.scheduler.status(req_id) is RequestStatus.RUNNING
            last = self._last_prefill
            if last not in (None, decision.task.task_id) and self.scheduler.is_live(last):
                self.num_switches += 1
            self._last_prefill = decision.task.task_id

    def _run_task(self, decision: Decision) -> None:
        if isinstance(decision.task, PrefillTask):
            self._run_prefill(decision.task)
        elif isinstance(decision.task, DecodeStep):
            self._run_step(decision.task)
            while decision.repeat_decode and not self._is_interrupted():
                self._run_step(decision.task)

    def _run_prefill(self, task: PrefillTask) -> None:
        remaining_s = self._remaining_s.get(task.task_id, self._prompt_s[task.req_ids[0]])
        remaining_s = self._remaining_s[task.task_id] = self._run_slices(task, remaining_s)
        if remaining_s > 0:
            self._reports.append(PrefillParked(task.task_id, remaining_s / self._slowness))
            return
        self._reports.append(PrefillDone(task.task_id))
        self._emit(task.req_ids)

    def _run_step(self, task: DecodeStep) -> None:
        if self._parked_step is None:
            step_s = self.scheduler._predictor.decode_step_s(len(task.req_ids), 0)
            self._parked_step = task, step_s * self._slowness
        step, remaining_s = self._parked_step  # one that was left midway goes on first
        remaining_s = self._run_slices(step, remaining_s)
        if remaining_s > 0:
            self._parked_step = step, remaining_s
            return
        self._parked_step = None
        self._reports.append(DecodeStepDone(step.req_ids))
        self._emit(step.req_ids)

    def _run_slices(self, task: PrefillTask | DecodeStep, remaining_s: float) -> float:
        """Run to the end, or to the first boundary after an interrupt. Returns what is left."""
        start_s, ran_s = self.now_s, remaining_s
        until_interrupt_s = self._next_interrupt_s() - self.now_s
        if until_interrupt_s < remaining_s:
            num_slices = max(1, math.ceil(until_interrupt_s / SLICE_S))
            ran_s = min(num_slices * SLICE_S, remaining_s)
        self.now_s += ran_s
        self.log.append(Ran(task, start_s, self.now_s))
        return remaining_s - ran_s

    def _emit(self, req_ids: tuple[int, ...]) -> None:
        for req_id in req_ids:
            self.token_times[req_id].append(self.now_s)
            if len(self.token_times[req_id]) == self._num_outputs[req_id]:
                self.ended[req_id] = "finished"
                self._reports.append(Finished(req_id))

    def _is_interrupted(self) -> bool:
        has_end = any(isinstance(event, Finished) for event in self._reports)
        return has_end or self._next_interrupt_s() <= self.now_s
