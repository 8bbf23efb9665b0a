"""Simulator: the real scheduler and block pool, and a modelled device, under a virtual clock.

The loop is the engine's (engine.py): take in events, decide, run the decided task until it ends or
is left. A task runs to its end or to the first boundary behind the next event in one step, so a
simulation takes time per decision and per decode step, never per slice.

The loop is a generator that stops wherever time passes, with the time at which it goes on unless an
event comes before. So many simulators can share one clock (cluster.py), each woken at its times.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from flowprefill.clock import VirtualClock
from flowprefill.granularity import Granularity
from flowprefill.predictor.base import Predictor
from flowprefill.scheduler.events import (
    Arrival,
    Cancel,
    Decision,
    DecodeStep,
    DecodeStepDone,
    Event,
    Finished,
    PacedSteps,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
    has_end,
    merge,
)
from flowprefill.scheduler.scheduler import Scheduler
from flowprefill.simulator.cost import CostModel, Timeline


@dataclass(slots=True)
class RequestRecord:
    """What happened to one request."""

    arrival: Arrival
    num_output_tokens: int
    """It ends with so many tokens."""
    num_tokens: int = 0
    first_token_s: float = math.inf
    last_token_s: float = math.inf
    max_gap_s: float = 0.0
    """Longest time between two tokens."""
    num_preemptions: int = 0
    """Up to its first token."""
    num_cached_tokens: int = 0
    """Prompt tokens that its first prefill found in the cache."""
    ended: str | None = None
    """finished, cancelled or rejected; None: not by the end of the simulation."""

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; infinite if there is none."""
        return self.first_token_s - self.arrival.arrival_s


@dataclass
class Counters:
    """What the device did."""

    busy_s: float = 0.0
    prefills: int = 0
    """Packed prompts count as one."""
    decode_steps: int = 0
    evictions: int = 0


@dataclass(slots=True)
class Work:
    """A pass in progress."""

    req_ids: tuple[int, ...]
    timeline: Timeline
    elapsed_s: float = 0.0
    predicted_ratio: float = 1.0
    """Predicted over true device time."""
    task_id: int | None = None
    """Of a prefill; None: a decode step."""

    @property
    def is_done(self) -> bool:
        return self.elapsed_s == self.timeline.total_s

    @property
    def predicted_remaining_s(self) -> float:
        return (self.timeline.total_s - self.elapsed_s) * self.predicted_ratio


class Simulator:
    """Runs a scheduler's decisions as the engine does, in virtual time.

    A subclass may look at every decision and token, and may set `is_stopped`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        cost: CostModel,
        predictor: Predictor,
        granularity: Granularity,
    ) -> None:
        """predictor: the scheduler's own; cost: the truth, which may differ."""
        self.scheduler = scheduler
        self.clock = VirtualClock()
        self.records: dict[int, RequestRecord] = {}
        """By req_id, from the submission on."""
        self.counters = Counters()
        self.is_stopped = False
        self._cost = cost
        self._predictor = predictor
        self._granularity = granularity
        self._inbox: list[tuple[float, int, Event]] = []  # heap
        self._order = itertools.count()
        self._happened: list[Event] = []  # what the last task's end or stop means to the scheduler
        self._decision = Decision(None)
        self._prefills: dict[int, Work] = {}  # started and unfinished, by task id
        self._step: Work | None = None  # left midway
        self._has_mail = True  # since the loop last said when it goes on
        self._loop = self._live()
        self._wake_s = math.inf
        self._until_s = math.inf
        self._is_between_tasks = True

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    # ---- what a user or a subclass does -------------------------------------------------------

    def submit(self, arrival: Arrival, num_output_tokens: int | None = None) -> None:
        """Let a request arrive at its time, or now. None: it generates its max_tokens."""
        record = RequestRecord(arrival, num_output_tokens or arrival.max_tokens)
        self.records[arrival.req_id] = record
        self.send(arrival.arrival_s, arrival)

    def send(self, time_s: float, event: Event) -> None:
        """Put an event into the inbox at `time_s`, or now if that has passed."""
        heapq.heappush(self._inbox, (max(time_s, self.now_s), next(self._order), event))
        self._has_mail = True

    def run(self, until_s: float = math.inf) -> None:
        """Go on until nothing happens before `until_s`, or until the first boundary behind it."""
        self._until_s = until_s
        while not self.is_stopped:
            wake_s = self.wake_s
            if self._is_between_tasks and wake_s >= until_s:
                return
            self.wake()

    @property
    def wake_s(self) -> float:
        """When something happens next unless an event is sent; infinite if nothing will."""
        if self._has_mail:
            self._wake_s = next(self._loop)
        return self._wake_s

    def wake(self) -> None:
        """It is wake_s, which was not infinite: go on."""
        self._wake_s = next(self._loop)

    def interrupts(self, task: PrefillTask) -> bool:
        """Whether its start takes the device from a pass in progress."""
        return task.task_id not in self._prefills and bool(self._prefills or self._step)

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        """Called behind each decision."""

    def on_token(self, record: RequestRecord) -> None:
        """Called when a request has its next token."""

    def on_run(self, work: Work, from_s: float) -> None:
        """Called when a pass has run from `from_s` to its elapsed_s of device time, up to now."""

    # ---- the engine's loop --------------------------------------------------------------------

    def _live(self) -> Iterator[float]:
        """Wait, decide, run; yields the time at which it goes on wherever time passes."""
        while True:
            self._is_between_tasks = True
            if not self._happened:
                yield from self._wait()
            while self.now_s >= self._until_s:
                yield self.now_s
            self._is_between_tasks = False
            self._decide()
            self._happened = yield from self._run_task()

    def _wait(self) -> Generator[float, None, None]:
        """Wait for the next event."""
        self._has_mail = True
        while self._has_mail:
            self._has_mail = False
            next_s = self._next_event_s()
            yield next_s
        self.clock.advance_to(max(self.now_s, next_s))

    def _next_event_s(self) -> float:
        """When the inbox has its next message, or the timer ends."""
        inbox_s = self._inbox[0][0] if self._inbox else math.inf
        timer_s = self._decision.timer_s
        return inbox_s if timer_s is None or inbox_s < timer_s else timer_s

    def _should_leave(self) -> bool:
        return self._next_event_s() <= self.now_s

    def _decide(self) -> None:
        events, now_s, timer_s = self._happened, self.now_s, self._decision.timer_s
        gone: list[int] = []  # without blocks from now on
        while self._inbox and self._inbox[0][0] <= now_s:
            event = heapq.heappop(self._inbox)[2]
            events.append(event)
            if isinstance(event, Cancel) and event.req_id in self.records:
                gone.append(event.req_id)
                self._end(event.req_id, "cancelled")
        if timer_s is not None and timer_s <= now_s:
            events.append(Timer())
        decision = self._decision = self.scheduler.decide(now_s, events)
        for req_id in decision.rejected:
            self._end(req_id, "rejected")
        self.counters.evictions += len(decision.evicted)
        gone += decision.evicted
        if gone:
            self._drop_passes_of(gone)
        self.on_decision(events, decision)

    def _end(self, req_id: int, how: str) -> None:
        self.records[req_id].ended = self.records[req_id].ended or how

    def _drop_passes_of(self, req_ids: Iterable[int]) -> None:
        """A step with one of them runs again for the others; prefills that lost all are gone."""
        if self._step and not set(req_ids).isdisjoint(self._step.req_ids):
            self._step = None
        for task_id in [t for t in self._prefills if not self.scheduler.is_live(t)]:
            del self._prefills[task_id]

    def _run_task(self) -> Generator[float, None, list[Event]]:
        """Run the decided task until it ends or is left. Returns what the scheduler must know."""
        decision = self._decision
        if isinstance(decision.task, PrefillTask):
            return (yield from self._run_prefill(decision.task, decision.steps))
        if isinstance(decision.task, DecodeStep):
            return (yield from self._run_steps(decision.task, decision.max_steps))
        return []

    def _run_prefill(
        self, task: PrefillTask, steps: PacedSteps | None
    ) -> Generator[float, None, list[Event]]:
        """Run the prefill, and decode steps beside it when they are due."""
        work = self._prefills.get(task.task_id) or self._start_prefill(task)
        due_s = steps.release_s if steps else math.inf
        num_steps = 0
        stepped: list[Event] = []
        while True:
            if steps and due_s <= self.now_s:
                stepped = merge(stepped, (yield from self._run_steps(steps.step, 1)))
                num_steps += 1
                due_s = self.now_s + steps.interval_s
                is_over = num_steps == steps.max_steps or has_end(stepped)
                if is_over or self._should_leave():
                    break
            if (yield from self._advance(work, due_s)):
                del self._prefills[task.task_id]
                self.counters.prefills += 1
                return [*stepped, PrefillDone(task.task_id), *self._emit(work.req_ids)]
            if self._should_leave():
                break
        return [PrefillParked(task.task_id, work.predicted_remaining_s), *stepped]

    def _start_prefill(self, task: PrefillTask) -> Work:
        prompts = []
        for req_id in task.req_ids:
            record, num_cached = self.records[req_id], self.scheduler.num_cached_tokens(req_id)
            # An evicted request computes again what it had generated.
            prompts.append((record.arrival.num_prompt_tokens + record.num_tokens, num_cached))
            if not record.num_tokens:
                record.num_cached_tokens = num_cached
        timeline = self._cost.timeline(prompts, self._granularity)
        predicted_s = (
            self._predictor.prefill_s(*prompts[0])
            if len(prompts) == 1
            else self._predictor.packed_prefill_s(prompts)
        )
        ratio = predicted_s / timeline.total_s
        work = Work(task.req_ids, timeline, predicted_ratio=ratio, task_id=task.task_id)
        self._prefills[task.task_id] = work
        return work

    def _run_steps(self, step: DecodeStep, max_steps: int) -> Generator[float, None, list[Event]]:
        """Run decode steps until one ends a request, max_steps have run, or something happens."""
        happened: list[Event] = []
        for _ in range(max_steps):
            work = self._step or self._start_step(step)
            if not (yield from self._advance(work)):
                self._step = work
                break
            self._step = None
            self.counters.decode_steps += 1
            ended = self._emit(work.req_ids)
            happened = merge(happened, [DecodeStepDone(work.req_ids, self.now_s), *ended])
            # A step that was left midway may have had other members than those that are due now.
            if ended or work.req_ids != step.req_ids or self._should_leave():
                break
        return happened

    def _start_step(self, step: DecodeStep) -> Work:
        records = [self.records[req_id] for req_id in step.req_ids]
        num_context_tokens = sum(r.arrival.num_prompt_tokens + r.num_tokens for r in records)
        return Work(step.req_ids, self._cost.step_timeline(len(records), num_context_tokens))

    def _advance(self, work: Work, until_s: float = math.inf) -> Generator[float, None, bool]:
        """Run to the end, or to the first boundary at or behind `until_s` or the next event.

        True if the pass is done.
        """
        timeline, now_s = work.timeline, self.now_s
        total_s = timeline.total_s
        self._has_mail = True
        while self._has_mail:
            self._has_mail = False
            available_s = min(self._next_event_s(), until_s) - now_s
            to_s = total_s
            if work.elapsed_s + available_s < total_s:
                to_s = timeline.next_boundary_s(work.elapsed_s + max(available_s, 0.0))
            ran_s = to_s - work.elapsed_s
            reached_s = now_s + ran_s
            if to_s < total_s:
                # Not below what was waited for: sums of floats differ in their last digits.
                reached_s = max(reached_s, now_s + available_s)
            yield reached_s
        from_s, work.elapsed_s = work.elapsed_s, to_s
        self.counters.busy_s += ran_s
        self.clock.advance_to(reached_s)
        self.on_run(work, from_s)
        return to_s == total_s

    def _emit(self, req_ids: tuple[int, ...]) -> list[Event]:
        """Each request has its next token. Returns the ends of those that end with it."""
        now_s = self.now_s
        ended: list[Event] = []
        for req_id in req_ids:
            record = self.records[req_id]
            if record.ended:  # cancelled while the others' pass went on
                continue
            record.num_tokens += 1
            if record.num_tokens == 1:
                record.first_token_s = now_s
                record.num_preemptions = self.scheduler.num_preemptions(req_id)
            elif now_s - record.last_token_s > record.max_gap_s:
                record.max_gap_s = now_s - record.last_token_s
            record.last_token_s = now_s
            if record.num_tokens == record.num_output_tokens:
                record.ended = "finished"
                ended.append(Finished(req_id))
            self.on_token(record)
        return ended
