"""Scheduler: from what happened to what the device does next. Pure: no clock, no thread, no torch.

`decide(now_s, events)` is called at a boundary, when something happened, and names one task: a
prefill (new or parked), with the decode steps that run beside it, or decode steps alone. The engine
and the simulator run the same class.

The rules, each with a scenario in tests/unit/scheduler:

- Order of prefills: the policy's (policy.py), among the tenants that are not ahead of their share
  (fairness.py); prefills past their deadline are owed a share of the device (ageing.py). A switch
  from one prefill to another needs an event that can start a task (arrival, end, cancel, timer),
  and one wake-up gives one switch at most; keys that differ by less than a switch costs never
  switch. So there are never more preemptions than such events.
- Short waiting prompts are packed with a short one that starts (batching.py).
- KV blocks: see memory.py. One that ranks first but finds too few blocks is skipped over by those
  that fit; after MAX_SKIPS such starts nothing else starts until it has its blocks.
- max_num_seqs is the width of a decode step, not a bound on who starts: an urgent newcomer must not
  wait for somebody's last token. Where more decode, each step takes those that are due first.
- Decode steps wait while a prefill can use the device, up to their release (decode.py).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from flowprefill.kv.block_pool import BlockPool
from flowprefill.predictor.base import Predictor
from flowprefill.request import RequestStatus
from flowprefill.scheduler.ageing import StarvationGuard, first_due
from flowprefill.scheduler.batching import joiners
from flowprefill.scheduler.decode import DecodePacer, StepPlan
from flowprefill.scheduler.events import (
    Arrival,
    Cancel,
    Decision,
    DecodeStepDone,
    Drain,
    Event,
    Finished,
    PacedSteps,
    PrefillDone,
    PrefillParked,
    PrefillTask,
    Timer,
)
from flowprefill.scheduler.fairness import FairShare
from flowprefill.scheduler.memory import KVMemory
from flowprefill.scheduler.policy import Policy
from flowprefill.scheduler.tracked import Tracked

MAX_SKIPS = 16
"""Requests that may start before one that ranked first but found too few free blocks."""
OVERRUN_FACTOR = 1.25
"""A prefill still running at this multiple of its predicted time is decided upon again; and a
request is infeasible for certain if it would be late by a prediction divided by it."""
MAX_FITTING_TRIES = 8
"""Requests that are tried for room in one decision; then those that hold blocks go on."""
MIN_OVERRUN_SLICES = 10
"""Slices an overrun must last at least, so that a prediction near 0 does not decide at each."""
SWITCH_COST_S = 0.0005
"""What a switch between two prefills costs; keys that differ by less do not switch."""
RESCALE_FROM = 0.02
"""Relative change of the device's speed from which predictions made before are scaled."""

_urgency = attrgetter("urgency")


@dataclass(frozen=True)
class SchedulerOptions:
    """What model.json says of scheduling, beside the policy."""

    max_num_seqs: int = 16
    """Sequences of one decode step, and prompts of one packed prefill."""
    max_slice_s: float = 0.004
    max_decode_share: float = 0.5
    starvation_share: float = 0.05
    max_pack_tokens: int | None = None
    """Tokens of a packed prefill; None = up to the device's saturation point."""
    reject_infeasible: bool = False
    fair_share: bool = False
    prefix_caching: bool = True


class Scheduler:
    """Requests, their KV blocks, and the order in which they get the device."""

    def __init__(
        self,
        policy: Policy,
        predictor: Predictor,
        pool: BlockPool,
        options: SchedulerOptions,
    ) -> None:
        assert options.max_num_seqs > 0 and 0 < options.max_decode_share <= 1
        self._policy = policy
        self._predictor = predictor
        self._options = options
        self._memory = KVMemory(pool, prefix_caching=options.prefix_caching)
        self._fair_share = FairShare() if options.fair_share else None
        self._guard = StarvationGuard(options.starvation_share)
        self._pacer = DecodePacer(
            predictor,
            max_num_seqs=options.max_num_seqs,
            max_slice_s=options.max_slice_s,
            max_decode_share=options.max_decode_share,
        )

        self._requests: dict[int, Tracked] = {}  # all live ones; each is in one of the next three
        self._waiting: dict[int, Tracked] = {}
        self._prefilling: dict[int, Tracked] = {}
        self._decoding: dict[int, Tracked] = {}
        self._candidates: list[Tracked] = []  # waiting and prefilling, in the order of urgency

        self._tasks: dict[int, list[int]] = {}  # unfinished prefill -> its live requests
        self._left_blocks: dict[int, list[int]] = {}  # of members that left a packed prefill
        self._next_task_id = itertools.count()
        self._current_task: int | None = None  # the unfinished prefill that ran last
        self._may_switch = False  # an event that can start a task came since the last prefill
        self._num_skips: dict[int, int] = {}  # by request that ranked first but did not fit
        self._evicted: list[int] = []  # since the last decision
        self._speed_factor = predictor.speed_factor  # that of the predictions made so far

        self._num_decisions = 0
        self._num_preemptions = 0

    # ---- the decision -------------------------------------------------------------------------

    def decide(self, now_s: float, events: Sequence[Event]) -> Decision:
        """Take in all events since the last call and name the next task.

        A running prefill is left at a boundary before the call: if it is unfinished, its
        PrefillParked comes first, and if the answer has the same task_id, it simply goes on. A
        decode step that was left midway goes on when decode steps are next due, whatever their
        members. Steps repeated without a decision are one DecodeStepDone.
        """
        self._num_decisions += 1
        self._rescale_predictions()  # before the events, which are predicted at today's speed
        for event in events:
            self._apply(event, now_s)
        rejected = self._reject_infeasible(now_s)
        step = self._plan_step()
        stretch = step.stretch if step else 1.0
        prefill = self._choose_prefill(now_s, stretch)
        self._guard.runs(prefill)
        if prefill is None:
            self._pause_current()
            evicted = self._take_evicted()
            if step is None:
                return Decision(None, evicted=evicted, rejected=rejected)
            num_steps = self._num_steps(step)
            return Decision(step.step, max_steps=num_steps, evicted=evicted, rejected=rejected)
        task = self._switch_to(prefill, now_s)
        return Decision(
            task,
            timer_s=self._prefill_timer_s(prefill, now_s, stretch),
            steps=self._pace(step, prefill, now_s),
            evicted=self._take_evicted(),
            rejected=rejected,
        )

    # ---- questions ----------------------------------------------------------------------------

    def block_ids(self, req_id: int) -> list[int]:
        """KV blocks of a started request, in token order. KeyError if it is not live."""
        return self._requests[req_id].block_ids

    def num_cached_tokens(self, req_id: int) -> int:
        """Leading tokens of a started request whose KV was found. KeyError if it is not live."""
        return self._requests[req_id].num_cached_tokens

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
    def num_evictions(self) -> int:
        """Times a request lost its KV blocks to a more urgent one."""
        return self._memory.num_evictions

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

    def served_tokens(self) -> dict[str, float]:
        """Tokens charged to each tenant with live requests, under fair share; else empty."""
        return self._fair_share.served() if self._fair_share else {}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every live request is in one place and holds its blocks."""
        places = [*self._waiting, *self._prefilling, *self._decoding]
        assert sorted(places) == sorted(self._requests), "a request is lost or in two places"
        in_tasks = [req_id for members in self._tasks.values() for req_id in members]
        assert sorted(in_tasks) == sorted(self._prefilling), "tasks and prefills disagree"
        for members in self._tasks.values():
            assert all(self._requests[i].num_packed == len(members) for i in members)
        order = sorted([*self._waiting.values(), *self._prefilling.values()], key=_urgency)
        assert order == self._candidates, "candidates are not the unfinished prefills in order"
        for request in self._requests.values():
            assert bool(request.block_ids) == (request.status is not RequestStatus.WAITING)
        assert set(self._num_skips) <= set(self._waiting)
        assert self._current_task is None or self._current_task in self._tasks
        assert set(self._left_blocks) <= set(self._tasks)
        held = [request.block_ids for request in self._requests.values()]
        self._memory.check_integrity([*held, *self._left_blocks.values()])

    # ---- events -------------------------------------------------------------------------------

    def _apply(self, event: Event, now_s: float) -> None:
        match event:
            case Arrival():
                self._add(event)
            case PrefillParked(task_id, remaining_s):
                for request in self._members(task_id):
                    request.remaining_s = remaining_s
                    self._charge_prefill(request)
                return  # state, not a reason to switch
            case PrefillDone(task_id):
                self._finish_prefill(task_id, now_s)
            case DecodeStepDone(req_ids, end_s, num_steps):
                self._finish_steps(req_ids, end_s, num_steps)
                return
            case Finished(req_id, prefix_keys):
                self._forget(req_id, prefix_keys)
            case Cancel(req_id):
                self._forget(req_id)
            case Timer():
                pass
            case Drain():
                return
        self._may_switch = True

    def _add(self, arrival: Arrival) -> None:
        assert arrival.req_id not in self._requests, f"request {arrival.req_id} arrived twice"
        request = Tracked.of(arrival, 0.0)
        self._predict(request)
        assert self._memory.blocks_for(request) <= self._memory.num_blocks, (
            f"request {arrival.req_id} can never fit"
        )
        self._requests[request.req_id] = self._waiting[request.req_id] = request
        insort(self._candidates, request, key=_urgency)
        if self._fair_share:
            self._fair_share.arrive(request)

    def _predict(self, request: Tracked) -> None:
        """Its prefill from the start, with what of it is cached now."""
        num_cached = len(self._memory.cached_blocks(request)) * self._memory.block_size
        request.remaining_s = self._predictor.prefill_s(request.num_input_tokens, num_cached)

    def _finish_prefill(self, task_id: int, now_s: float) -> None:
        members = self._members(task_id)
        for request in members:
            del self._prefilling[request.req_id]
            self._remove_candidate(request)
            self._decoding[request.req_id] = request
            request.status = RequestStatus.DECODING
            request.num_context_tokens = request.num_input_tokens
            request.remaining_s = 0.0
            request.give_token(now_s)
            self._charge_prefill(request)
            self._memory.publish(request, request.prefix_keys)
        if members:
            self._drop_task(task_id)

    def _finish_steps(self, req_ids: Sequence[int], end_s: float, num_steps: int) -> None:
        self._pacer.step_ended(end_s)
        for req_id in req_ids:
            request = self._decoding.get(req_id)
            if request is not None:  # it may have been cancelled meanwhile
                request.num_context_tokens += num_steps
                request.give_token(end_s)
                if self._fair_share:
                    self._fair_share.charge(request, num_steps)

    def _forget(self, req_id: int, prefix_keys: Sequence[Hashable] = ()) -> None:
        request = self._requests.pop(req_id, None)
        if request is None:
            return
        if req_id in self._decoding:
            del self._decoding[req_id]
            self._memory.publish(request, prefix_keys)
        else:
            self._remove_candidate(request)
            self._waiting.pop(req_id, None)
            self._prefilling.pop(req_id, None)
        self._num_skips.pop(req_id, None)
        if self._fair_share:
            self._fair_share.leave(request)
        task_id = request.task_id
        if task_id is not None:
            self._tasks[task_id].remove(req_id)
            for member in self._members(task_id):
                member.num_packed -= 1
            if self._tasks[task_id]:  # the pass goes on and writes its rows
                self._left_blocks.setdefault(task_id, []).extend(request.block_ids)
                return
            self._drop_task(task_id)
        self._memory.free(request.block_ids)

    def _remove_candidate(self, request: Tracked) -> None:
        index = bisect_left(self._candidates, request.urgency, key=_urgency)
        assert self._candidates[index] is request
        del self._candidates[index]

    def _members(self, task_id: int) -> list[Tracked]:
        """The live requests of an unfinished prefill; none if it is over."""
        return [self._requests[req_id] for req_id in self._tasks.get(task_id, ())]

    def _drop_task(self, task_id: int) -> None:
        """The prefill is over, one way or the other."""
        for request in self._members(task_id):
            request.task_id = None
            request.num_packed = 1
        del self._tasks[task_id]
        self._memory.free(self._left_blocks.pop(task_id, []))
        if self._current_task == task_id:
            self._current_task = None

    def _charge_prefill(self, request: Tracked) -> None:
        if self._fair_share:
            self._fair_share.charge_prefill(request)

    def _rescale_predictions(self) -> None:
        """The device became faster or slower: so did everything that was predicted before."""
        ratio = self._predictor.speed_factor / self._speed_factor
        if abs(ratio - 1) < RESCALE_FROM:
            return
        self._speed_factor = self._predictor.speed_factor
        for request in self._candidates:
            request.remaining_s *= ratio
            request.prefill_s *= ratio

    def _reject_infeasible(self, now_s: float) -> tuple[int, ...]:
        """Drop waiting requests that are late for certain, if model.json asks for it.

        Not if that is all there is: then nobody else loses, and a run is what mends a wrong
        prediction.
        """
        if not self._options.reject_infeasible:
            return ()
        rejected = tuple(
            r.req_id
            for r in self._waiting.values()
            if r.deadline_s < now_s + r.remaining_s / OVERRUN_FACTOR
        )
        if len(rejected) == len(self._requests):
            return ()
        for req_id in rejected:
            self._forget(req_id)
        return rejected

    # ---- KV blocks ----------------------------------------------------------------------------

    def _holders(self) -> list[list[Tracked]]:
        """Who holds blocks, in groups that lose them together."""
        prefills = [self._members(task_id) for task_id in self._tasks]
        return [*prefills, *([request] for request in self._decoding.values())]

    def _try_start(self, request: Tracked, *, may_evict: bool) -> bool:
        """Make a waiting request a holder of the blocks that its prefill needs."""
        victims = self._memory.start(request, self._holders() if may_evict else [])
        if victims is None:
            return False
        self._unseat(victims)
        request.remaining_s = self._predictor.prefill_s(
            request.num_input_tokens, request.num_cached_tokens
        )
        request.status = RequestStatus.PREEMPTED
        self._prefilling[request.req_id] = self._waiting.pop(request.req_id)
        self._num_skips.pop(request.req_id, None)
        for req_id in self._num_skips:
            self._num_skips[req_id] += 1
        return True

    def _unseat(self, victims: Iterable[Tracked]) -> None:
        """These have lost their blocks; they wait for their next start."""
        for request in victims:
            self._evicted.append(request.req_id)
            if self._decoding.pop(request.req_id, None):
                # The last token's KV was never written: it is the input's last one.
                request.num_input_tokens = request.num_context_tokens + 1
                insort(self._candidates, request, key=_urgency)
            elif request.task_id is not None:
                task_id = request.task_id
                for member in self._members(task_id):
                    del self._prefilling[member.req_id]
                self._drop_task(task_id)
            request.status = RequestStatus.WAITING
            request.num_cached_tokens = 0
            request.prefill_s = 0.0
            self._waiting[request.req_id] = request
            self._predict(request)

    def _take_evicted(self) -> tuple[int, ...]:
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def _plan_step(self) -> StepPlan | None:
        """The next decode step, with room for its tokens."""
        while True:
            members = self._pacer.members(self._decoding.values())
            evicted = self._memory.grow(members, self._holders)
            if not evicted:
                return self._pacer.plan(members)
            self._unseat(evicted)

    # ---- prefill ------------------------------------------------------------------------------

    def _choose_prefill(self, now_s: float, stretch: float) -> Tracked | None:
        """The prefill that goes first and holds its blocks."""
        first = first_due(self._candidates)
        late = first if first and first.deadline_s < now_s else None
        self._guard.pass_time(now_s, late)
        current = self._current()
        if current is not None and not self._may_switch:
            return current
        self._start_overdue()
        if not self._candidates:
            return None
        best = self._first(self._candidates, current, now_s, stretch)
        if late is not None and late is not best and self._owes_late(best, now_s, stretch):
            best = late
        may_start = self._overdue() is None
        if best.block_ids or (may_start and self._try_start_task(best, now_s)):
            return best
        self._num_skips.setdefault(best.req_id, 0)
        return self._first_that_fits(best, may_start, now_s, stretch)

    def _first(
        self, candidates: Sequence[Tracked], current: Tracked | None, now_s: float, stretch: float
    ) -> Tracked:
        """The policy's choice, among tenants that are not ahead of their share."""
        if self._fair_share:
            candidates = self._fair_share.within_share(candidates)
        return self._policy.choose(candidates, current, now_s, stretch, SWITCH_COST_S)

    def _owes_late(self, best: Tracked, now_s: float, stretch: float) -> bool:
        """Whether the prefill that has been late longest goes before `best`."""
        return self._can_starve() and self._guard.owes(best, now_s, stretch)

    def _can_starve(self) -> bool:
        """Whether newcomers can pass a candidate again and again."""
        return self._policy.can_starve or self._candidates[0].rank != self._candidates[-1].rank

    def _first_that_fits(
        self, best: Tracked, may_start: bool, now_s: float, stretch: float
    ) -> Tracked | None:
        """The policy's choice among those that run without blocks that others hold."""
        holders = [c for c in self._candidates if c.block_ids]
        others = self._candidates if may_start else holders
        current = self._current()
        fitting = [c for c in others if c.block_ids or self._memory.might_fit(c)]
        for num_tries in itertools.count(1):
            if not fitting:
                return None
            choice = self._first(fitting, current, now_s, stretch)
            if choice.block_ids or self._try_start_task(choice, now_s, may_evict=False):
                return choice
            fitting.remove(choice)
            if num_tries == MAX_FITTING_TRIES:
                fitting = holders
        return None

    def _current(self) -> Tracked | None:
        if self._current_task is None:
            return None
        return self._requests[self._tasks[self._current_task][0]]

    def _overdue(self) -> Tracked | None:
        """The first waiting request that was skipped over often enough."""
        for req_id, num_skips in self._num_skips.items():
            if num_skips >= MAX_SKIPS:
                return self._waiting[req_id]
        return None

    def _start_overdue(self) -> None:
        """Give skipped requests their blocks as soon as they fit, whoever ranks first by now.

        They are parked at their start then, and newcomers may start and rank before them again.
        """
        while (request := self._overdue()) and self._try_start(request, may_evict=True):
            self._new_task([request])

    def _try_start_task(self, request: Tracked, now_s: float, *, may_evict: bool = True) -> bool:
        """Start a waiting request and those that are packed with it."""
        if not self._try_start(request, may_evict=may_evict):
            return False
        members = [request]
        max_tokens = self._options.max_pack_tokens
        if max_tokens is None:
            max_tokens = self._predictor.saturation_tokens
        if self._waiting and request.num_input_tokens - request.num_cached_tokens < max_tokens:
            members += joiners(
                request,
                (c for c in self._candidates if not c.block_ids),
                max_tokens=max_tokens,
                max_requests=self._options.max_num_seqs,
                now_s=now_s,
                reserve=self._try_join,
            )
        self._new_task(members)
        return True

    def _try_join(self, request: Tracked) -> bool:
        return self._overdue() is None and self._try_start(request, may_evict=False)

    def _new_task(self, members: Sequence[Tracked]) -> None:
        """A prefill, parked at its start, of requests that hold their blocks."""
        task_id = next(self._next_task_id)
        self._tasks[task_id] = [request.req_id for request in members]
        prefill_s = members[0].remaining_s
        if len(members) > 1:
            shapes = [(r.num_input_tokens, r.num_cached_tokens) for r in members]
            prefill_s = self._predictor.packed_prefill_s(shapes)
        for request in members:
            request.task_id = task_id
            request.num_packed = len(members)
            request.prefill_s = request.remaining_s = prefill_s

    def _switch_to(self, prefill: Tracked, now_s: float) -> PrefillTask:
        task_id = prefill.task_id
        assert task_id is not None
        if self._current_task not in (None, task_id):
            for request in self._pause_current():
                request.num_preemptions += 1
            self._num_preemptions += 1
        members = self._members(task_id)
        for request in members:
            request.status = RequestStatus.RUNNING
        self._current_task = task_id
        self._may_switch = False
        return PrefillTask(task_id, tuple(request.req_id for request in members))

    def _pause_current(self) -> list[Tracked]:
        """Another task gets the device; the unfinished prefill keeps its place and its blocks."""
        if self._current_task is None:
            return []
        members = self._members(self._current_task)
        for request in members:
            request.status = RequestStatus.PREEMPTED
        return members

    # ---- decode steps and timers --------------------------------------------------------------

    def _num_steps(self, step: StepPlan) -> int:
        """Steps that can run without a new decision."""
        members = step.step.req_ids
        if len(members) < len(self._decoding):  # then the next step has others
            return 1
        return min(self._memory.num_steps(self._decoding[req_id]) for req_id in members)

    def _pace(self, step: StepPlan | None, prefill: Tracked, now_s: float) -> PacedSteps | None:
        """The planned steps beside `prefill`; others if some lost their blocks to it."""
        if step is None:
            return None
        if not self._decoding.keys() >= set(step.step.req_ids):
            with_room = [r for r in self._decoding.values() if self._memory.num_steps(r) > 0]
            step = self._pacer.plan(self._pacer.members(with_room))
        return step.paced(prefill, now_s, self._num_steps(step)) if step else None

    def _prefill_timer_s(self, prefill: Tracked, now_s: float, stretch: float) -> float | None:
        """The first of: late prefills' share, overrun; if anyone else wants the device."""
        if len(self._candidates) <= prefill.num_packed:
            return None
        min_s = self._options.max_slice_s
        expected_s = prefill.remaining_s * stretch
        overrun_s = max(expected_s * (OVERRUN_FACTOR - 1), min_s * MIN_OVERRUN_SLICES)
        timer_s = now_s + expected_s + overrun_s
        wake_s = None
        if self._can_starve():
            wake_s = self._guard.wake_s(now_s, min_s, self._candidates)
        return timer_s if wake_s is None else min(timer_s, wake_s)
