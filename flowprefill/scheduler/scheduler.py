"""Scheduler: from what happened to what the device does next. Pure: no clock, no thread, no torch.

`decide(now_s, events)` is called at a boundary, when something happened, and names one task: a
prefill (new or parked) or a decode step. The engine and the simulator run the same class.

The rules, each with a scenario in tests/unit/scheduler:

- Order of prefills: the policy's (policy.py). A switch from one prefill to another needs an event
  that can start a task (arrival, end, cancel, timer), and one wake-up gives one switch at most;
  equal keys never switch. So there are never more preemptions than such events.
- KV blocks: a request that starts reserves its whole need, prompt + max_tokens, and so can always
  finish. One that ranks first but finds too few blocks is skipped over by those that fit; after
  MAX_SKIPS such starts nothing else starts until it has its blocks.
- max_num_seqs is the width of a decode step, not a bound on who starts: an urgent newcomer must not
  wait for somebody's last token. Where more decode, each step takes those that are due first.
- Decode steps wait while a prefill can use the device, up to their release (decode.py).
- A request that has not started queue_timeout_s after its arrival is dropped.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from flowprefill.kv.block_pool import BlockPool
from flowprefill.predictor.base import Predictor
from flowprefill.request import RequestStatus
from flowprefill.scheduler.decode import DecodePacer, StepPlan
from flowprefill.scheduler.events import (
    Arrival,
    Cancel,
    Decision,
    DecodeStepDone,
    Drain,
    Event,
    Finished,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.policy import Policy
from flowprefill.scheduler.tracked import Tracked

MAX_SKIPS = 16
"""Requests that may start before one that ranked first but found too few free blocks."""
OVERRUN_FACTOR = 1.25
"""A prefill still running at this multiple of its predicted time is decided upon again."""
MIN_OVERRUN_SLICES = 10
"""Slices an overrun must last at least, so that a prediction near 0 does not decide at each."""


class Scheduler:
    """Requests, their KV blocks, and the order in which they get the device."""

    def __init__(
        self,
        policy: Policy,
        predictor: Predictor,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        max_slice_s: float,
        max_decode_share: float,
        queue_timeout_s: float,
    ) -> None:
        assert max_num_seqs > 0 and 0 < max_decode_share <= 1
        self._policy = policy
        self._predictor = predictor
        self._pool = pool
        self._max_slice_s = max_slice_s
        self._queue_timeout_s = queue_timeout_s
        self._pacer = DecodePacer(
            predictor,
            max_num_seqs=max_num_seqs,
            max_slice_s=max_slice_s,
            max_decode_share=max_decode_share,
        )

        self._requests: dict[int, Tracked] = {}  # all live ones; each is in one of the next three
        self._waiting: dict[int, Tracked] = {}
        self._prefilling: dict[int, Tracked] = {}
        self._decoding: dict[int, Tracked] = {}

        self._tasks: dict[int, list[int]] = {}  # unfinished prefill -> its live requests
        self._next_task_id = itertools.count()
        self._current_task: int | None = None  # the unfinished prefill that ran last
        self._may_switch = False  # an event that can start a task came since the last prefill
        self._num_skips: dict[int, int] = {}  # by request that ranked first but did not fit
        self._queue: list[tuple[float, int]] = []  # heap of (arrival, id); stale ids drop lazily

        self._num_decisions = 0
        self._num_preemptions = 0

    # ---- the decision -------------------------------------------------------------------------

    def decide(self, now_s: float, events: Sequence[Event]) -> Decision:
        """Take in all events since the last call and name the next task.

        A running prefill is left at a boundary before the call: if it is unfinished, its
        PrefillParked comes first, and if the answer has the same task_id, it simply goes on. A
        decode step that was left midway goes on when the answer is a decode step, whatever its
        members. Steps repeated without a decision are one DecodeStepDone; all tokens count as given
        at `now_s`.
        """
        self._num_decisions += 1
        for event in events:
            self._apply(event, now_s)
        timed_out = self._drop_timed_out(now_s)
        step = self._pacer.plan(self._decoding.values())
        prefill = self._choose_prefill(now_s, step.stretch if step else 1.0)

        if step is not None and (prefill is None or step.goes_before(prefill, now_s)):
            self._pause_current()
            # If all sequences are in this step, the next one is the same until an event comes.
            repeat = prefill is None and len(step.task.req_ids) == len(self._decoding)
            return Decision(step.task, self._queue_timer_s(), repeat, timed_out)
        if prefill is None:
            return Decision(None, self._queue_timer_s(), timed_out=timed_out)
        task = self._switch_to(prefill)
        timer_s = self._prefill_timer_s(prefill, step, now_s)
        return Decision(task, timer_s, timed_out=timed_out)

    # ---- questions ----------------------------------------------------------------------------

    def block_ids(self, req_id: int) -> list[int]:
        """KV blocks of a started request, in token order. KeyError if it is not live."""
        return self._requests[req_id].block_ids

    def status(self, req_id: int) -> RequestStatus:
        """Where the request stands; FINISHED for any id that is not live."""
        request = self._requests.get(req_id)
        return request.status if request else RequestStatus.FINISHED

    def is_live(self, task_id: int) -> bool:
        """False once a prefill is done or all its requests are gone: its state may be dropped."""
        return task_id in self._tasks

    def num_preemptions(self, req_id: int | None = None) -> int:
        """Times another prefill displaced this live request; without an id, all since the start."""
        if req_id is None:
            return self._num_preemptions
        request = self._requests.get(req_id)
        return request.num_preemptions if request else 0

    @property
    def num_decisions(self) -> int:
        return self._num_decisions

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_prefilling(self) -> int:
        """Running and parked prefills."""
        return len(self._prefilling)

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every live request is in one place and holds its blocks."""
        places = [*self._waiting, *self._prefilling, *self._decoding]
        assert sorted(places) == sorted(self._requests), "a request is lost or in two places"
        in_tasks = [req_id for members in self._tasks.values() for req_id in members]
        assert sorted(in_tasks) == sorted(self._prefilling), "tasks and prefills disagree"
        for request in self._requests.values():
            started = request.status is not RequestStatus.WAITING
            assert len(request.block_ids) == (request.num_blocks if started else 0)
        assert set(self._num_skips) <= set(self._waiting)
        assert self._current_task is None or self._current_task in self._tasks
        self._pool.check_integrity([r.block_ids for r in self._requests.values()])

    # ---- events -------------------------------------------------------------------------------

    def _apply(self, event: Event, now_s: float) -> None:
        match event:
            case Arrival():
                self._add(event)
            case PrefillParked(task_id, remaining_s):
                for req_id in self._tasks.get(task_id, ()):
                    self._requests[req_id].remaining_s = remaining_s
                return  # state, not a reason to switch
            case PrefillDone(task_id):
                self._finish_prefill(task_id, now_s)
            case DecodeStepDone(req_ids, num_steps):
                self._finish_steps(req_ids, num_steps, now_s)
                return
            case Finished(req_id) | Cancel(req_id):
                self._forget(req_id)
            case Timer():
                pass
            case Drain():
                return
        self._may_switch = True

    def _add(self, arrival: Arrival) -> None:
        assert arrival.req_id not in self._requests, f"request {arrival.req_id} arrived twice"
        num_blocks = self._pool.blocks_for(arrival.num_prompt_tokens + arrival.max_tokens)
        assert num_blocks <= self._pool.num_blocks, f"request {arrival.req_id} can never fit"
        request = Tracked(
            req_id=arrival.req_id,
            arrival_s=arrival.arrival_s,
            deadline_s=arrival.arrival_s + arrival.ttft_slo_s,
            tbt_slo_s=arrival.tbt_slo_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_blocks=num_blocks,
            remaining_s=self._predictor.prefill_s(arrival.num_prompt_tokens),
        )
        self._requests[request.req_id] = self._waiting[request.req_id] = request
        heapq.heappush(self._queue, (request.arrival_s, request.req_id))

    def _finish_prefill(self, task_id: int, now_s: float) -> None:
        for req_id in self._tasks.pop(task_id, ()):
            request = self._decoding[req_id] = self._prefilling.pop(req_id)
            request.status = RequestStatus.DECODING
            request.num_context_tokens = request.num_prompt_tokens
            request.last_token_s = now_s
        if self._current_task == task_id:
            self._current_task = None

    def _finish_steps(self, req_ids: Sequence[int], num_steps: int, now_s: float) -> None:
        self._pacer.step_ended(now_s)
        for req_id in req_ids:
            request = self._decoding.get(req_id)
            if request is not None:  # it may have been cancelled meanwhile
                request.num_context_tokens += num_steps
                request.last_token_s = now_s

    def _forget(self, req_id: int) -> None:
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        for place in (self._waiting, self._prefilling, self._decoding):
            place.pop(req_id, None)
        self._num_skips.pop(req_id, None)
        self._pool.free(request.block_ids)
        if request.task_id in self._tasks:
            members = self._tasks[request.task_id]
            members.remove(req_id)
            if not members:
                del self._tasks[request.task_id]
                if self._current_task == request.task_id:
                    self._current_task = None

    # ---- queue timeout ------------------------------------------------------------------------

    def _queue_timer_s(self) -> float | None:
        """When the oldest waiting request times out."""
        while self._queue and self._queue[0][1] not in self._waiting:
            heapq.heappop(self._queue)
        return self._queue[0][0] + self._queue_timeout_s if self._queue else None

    def _drop_timed_out(self, now_s: float) -> tuple[int, ...]:
        dropped = []
        while (timeout_s := self._queue_timer_s()) is not None and timeout_s <= now_s:
            _, req_id = heapq.heappop(self._queue)
            self._forget(req_id)
            dropped.append(req_id)
            self._may_switch = True
        return tuple(dropped)

    # ---- prefill ------------------------------------------------------------------------------

    def _choose_prefill(self, now_s: float, stretch: float) -> Tracked | None:
        current = self._current()
        if current is not None and not self._may_switch:
            return current
        self._reserve_overdue()
        candidates = [*self._prefilling.values(), *self._waiting.values()]
        if not candidates:
            return None
        best = self._policy.choose(candidates, current, now_s, stretch)
        room = 0 if self._overdue() else self._pool.num_free
        if _needs(best) <= room:
            return best
        self._num_skips.setdefault(best.req_id, 0)
        runnable = [c for c in candidates if _needs(c) <= room]
        return self._policy.choose(runnable, current, now_s, stretch) if runnable else None

    def _current(self) -> Tracked | None:
        if self._current_task is None:
            return None
        return self._prefilling[self._tasks[self._current_task][0]]

    def _overdue(self) -> Tracked | None:
        """The first waiting request that was skipped over often enough."""
        for req_id, num_skips in self._num_skips.items():
            if num_skips >= MAX_SKIPS:
                return self._waiting[req_id]
        return None

    def _reserve_overdue(self) -> None:
        """Give skipped requests their blocks as soon as they fit, whoever ranks first by now.

        They are parked at their start then, and newcomers may start and rank before them again.
        """
        while (request := self._overdue()) and request.num_blocks <= self._pool.num_free:
            self._reserve(request)

    def _reserve(self, request: Tracked) -> None:
        """Make a waiting request a parked prefill that holds all blocks it will need."""
        block_ids = self._pool.allocate(request.num_blocks)
        assert block_ids is not None, "started without room"
        request.block_ids = block_ids
        request.status = RequestStatus.PREEMPTED
        request.task_id = next(self._next_task_id)
        self._tasks[request.task_id] = [request.req_id]
        self._prefilling[request.req_id] = self._waiting.pop(request.req_id)
        self._num_skips.pop(request.req_id, None)
        for req_id in self._num_skips:
            self._num_skips[req_id] += 1

    def _switch_to(self, prefill: Tracked) -> PrefillTask:
        if prefill.status is RequestStatus.WAITING:
            self._reserve(prefill)
        assert prefill.task_id is not None
        if self._current_task not in (None, prefill.task_id):
            for request in self._pause_current():
                request.num_preemptions += 1
            self._num_preemptions += 1
        members = self._tasks[prefill.task_id]
        for req_id in members:
            self._requests[req_id].status = RequestStatus.RUNNING
        self._current_task = prefill.task_id
        self._may_switch = False
        return PrefillTask(prefill.task_id, tuple(members))

    def _pause_current(self) -> list[Tracked]:
        """Another task gets the device; the unfinished prefill keeps its place and its blocks."""
        if self._current_task is None:
            return []
        members = [self._requests[req_id] for req_id in self._tasks[self._current_task]]
        for request in members:
            request.status = RequestStatus.PREEMPTED
        return members

    def _prefill_timer_s(
        self, prefill: Tracked, step: StepPlan | None, now_s: float
    ) -> float | None:
        """The first of: queue timeout, decode step, overrun (if anyone else wants the device)."""
        times = [self._queue_timer_s()]
        if step is not None:
            times.append(step.recheck_s(now_s))
        if len(self._prefilling) + len(self._waiting) > 1:
            overrun_s = max(
                prefill.remaining_s * (OVERRUN_FACTOR - 1), self._max_slice_s * MIN_OVERRUN_SLICES
            )
            times.append(now_s + prefill.remaining_s + overrun_s)
        return min((t for t in times if t is not None), default=None)


def _needs(request: Tracked) -> int:
    """Free blocks without which it cannot run now."""
    return request.num_blocks - len(request.block_ids)
