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
  that fit; after MAX_SKIPS such starts nothing with a later claim starts until it has its blocks.
- max_num_seqs is the width of a decode step, not a bound on who starts: an urgent newcomer must not
  wait for somebody's last token. Where more decode, each step takes those that are due first.
- Decode steps wait while a prefill can use the device, up to their release (decode.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

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
from flowprefill.scheduler.roster import Roster, urgency
from flowprefill.scheduler.tracked import Tracked

OVERRUN_FACTOR = 1.25
"""A prefill still running at this multiple of its predicted time is decided upon again; and a
request is infeasible for certain if it would be late by a prediction divided by it."""
MAX_LOOKED_AT = 128
"""Most urgent requests among which one with room is looked for; bounds the time of a decision."""
MAX_FITTING_TRIES = 4
"""Requests that are tried for room in one decision; then those that hold blocks go on."""
MIN_OVERRUN_SLICES = 10
"""Slices an overrun must last at least, so that a prediction near 0 does not decide at each."""
SWITCH_COST_S = 0.0005
"""Upper bound of what a switch between two prefills costs (docs/log.md); keys that differ by less
do not switch."""
RESCALE_FROM = 0.02
"""Relative change of the device's speed from which predictions made before are scaled."""


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
        self._roster = Roster(KVMemory(pool, prefix_caching=options.prefix_caching), predictor)
        self._fair_share = FairShare() if options.fair_share else None
        self._guard = StarvationGuard(options.starvation_share)
        self._pacer = DecodePacer(
            predictor,
            max_num_seqs=options.max_num_seqs,
            max_slice_s=options.max_slice_s,
            max_decode_share=options.max_decode_share,
        )

        self._may_switch = False  # an event that can start a task came since the last prefill
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
        first = first_due(self._roster.candidates)
        late = first if first and first.deadline_s < now_s else None  # the one late longest
        self._guard.pass_time(now_s, late)
        if self._policy.gives_up_late:
            self._roster.memory.put_late_last(now_s, late)
        step = self._plan_step()
        stretch = step.stretch if step else 1.0
        prefill = self._choose_prefill(late, now_s, stretch)
        self._guard.runs(prefill)
        if prefill is None:
            self._roster.pause()
            evicted = self._roster.take_evicted()
            if step is None:
                return Decision(None, evicted=evicted, rejected=rejected)
            num_steps = self._num_steps(step)
            return Decision(step.step, max_steps=num_steps, evicted=evicted, rejected=rejected)
        task = self._switch_to(prefill)
        return Decision(
            task,
            timer_s=self._prefill_timer_s(prefill, now_s, stretch),
            steps=self._pace(step, prefill, now_s),
            evicted=self._roster.take_evicted(),
            rejected=rejected,
        )

    # ---- questions ----------------------------------------------------------------------------

    def block_ids(self, req_id: int) -> list[int]:
        """KV blocks of a started request, in token order. KeyError if it is not live."""
        return self._roster.requests[req_id].block_ids

    def num_cached_tokens(self, req_id: int) -> int:
        """Leading tokens of a started request whose KV was found. KeyError if it is not live."""
        return self._roster.requests[req_id].num_cached_tokens

    def status(self, req_id: int) -> RequestStatus:
        """Where the request stands; FINISHED for any id that is not live."""
        request = self._roster.requests.get(req_id)
        return request.status if request else RequestStatus.FINISHED

    def is_live(self, task_id: int) -> bool:
        """False once a prefill is done or all its requests are gone: its state may be dropped."""
        return task_id in self._roster.tasks

    def num_preemptions(self, req_id: int | None = None) -> int:
        """Times another prefill displaced this live request; without an id, all since the start."""
        if req_id is None:
            return self._num_preemptions
        request = self._roster.requests.get(req_id)
        return request.num_preemptions if request else 0

    @property
    def num_decisions(self) -> int:
        return self._num_decisions

    @property
    def num_evictions(self) -> int:
        """Times a request lost its KV blocks to a more urgent one."""
        return self._roster.memory.num_evictions

    @property
    def num_waiting(self) -> int:
        return len(self._roster.waiting)

    @property
    def num_prefilling(self) -> int:
        """Running and parked prefills."""
        return len(self._roster.prefilling)

    @property
    def num_decoding(self) -> int:
        return len(self._roster.decoding)

    def served_tokens(self) -> dict[str, float]:
        """Tokens charged to each tenant with live requests, under fair share; else empty."""
        return self._fair_share.served() if self._fair_share else {}

    def check_integrity(self) -> None:
        """Raise AssertionError unless every live request is in one place and holds its blocks."""
        self._roster.check_integrity()

    # ---- events -------------------------------------------------------------------------------

    def _apply(self, event: Event, now_s: float) -> None:
        match event:
            case Arrival():
                self._add(event)
            case PrefillParked(task_id, remaining_s):
                for request in self._roster.members(task_id):
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
        request = Tracked.of(arrival)
        self._roster.add(request)
        if self._fair_share:
            self._fair_share.arrive(request)

    def _finish_prefill(self, task_id: int, now_s: float) -> None:
        for request in self._roster.finish_prefill(task_id, now_s):
            self._charge_prefill(request)

    def _finish_steps(self, req_ids: Sequence[int], end_s: float, num_steps: int) -> None:
        self._pacer.step_ended(end_s)
        for req_id in req_ids:
            request = self._roster.decoding.get(req_id)
            if request is not None:  # it may have been cancelled meanwhile
                request.num_context_tokens += num_steps
                request.give_token(end_s)
                if self._fair_share:
                    self._fair_share.charge(request, num_steps)

    def _forget(self, req_id: int, prefix_keys: Sequence[Hashable] = ()) -> None:
        request = self._roster.forget(req_id, prefix_keys)
        if request is not None and self._fair_share:
            self._fair_share.leave(request)

    def _charge_prefill(self, request: Tracked) -> None:
        if self._fair_share:
            self._fair_share.charge_prefill(request)

    def _rescale_predictions(self) -> None:
        """The device became faster or slower: so did everything that was predicted before."""
        ratio = self._predictor.speed_factor / self._speed_factor
        if abs(ratio - 1) < RESCALE_FROM:
            return
        self._speed_factor = self._predictor.speed_factor
        for request in self._roster.candidates:
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
            for r in self._roster.waiting.values()
            if r.deadline_s < now_s + r.remaining_s / OVERRUN_FACTOR
        )
        if len(rejected) == len(self._roster.requests):
            return ()
        for req_id in rejected:
            self._forget(req_id)
        return rejected

    # ---- decode steps -------------------------------------------------------------------------

    def _plan_step(self) -> StepPlan | None:
        """The next decode step, with room for its tokens."""
        while True:
            members = self._pacer.members(self._roster.decoding.values())
            if self._roster.grow(members):
                return self._pacer.plan(members)

    def _num_steps(self, step: StepPlan) -> int:
        """Steps that can run without a new decision."""
        members, decoding = step.step.req_ids, self._roster.decoding
        if len(members) < len(decoding):  # then the next step has others
            return 1
        return min(self._roster.memory.num_steps(decoding[req_id]) for req_id in members)

    def _pace(self, step: StepPlan | None, prefill: Tracked, now_s: float) -> PacedSteps | None:
        """The planned steps beside `prefill`; others if some lost their blocks to it."""
        if step is None:
            return None
        decoding = self._roster.decoding
        if not decoding.keys() >= set(step.step.req_ids):
            with_room = [r for r in decoding.values() if self._roster.memory.num_steps(r) > 0]
            step = self._pacer.plan(self._pacer.members(with_room))
        return step.paced(prefill, now_s, self._num_steps(step)) if step else None

    # ---- prefill ------------------------------------------------------------------------------

    def _choose_prefill(self, late: Tracked | None, now_s: float, stretch: float) -> Tracked | None:
        """The prefill that goes first and holds its blocks. late: the one late longest."""
        current = self._roster.current()
        if current is not None and not self._may_switch:
            return current
        self._start_overdue()
        if not self._roster.candidates:
            return None
        best = self._first(self._roster.candidates, current, now_s, stretch)
        if late is not None and late is not best and self._owes_late(best, now_s, stretch):
            best = late
        if best.block_ids or (self._roster.may_start(best) and self._try_start_task(best, now_s)):
            return best
        self._roster.skip(best)
        return self._first_that_fits(now_s, stretch)

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
        candidates = self._roster.candidates
        return self._policy.can_starve or candidates[0].rank != candidates[-1].rank

    def _first_that_fits(self, now_s: float, stretch: float) -> Tracked | None:
        """The policy's choice among those that run without blocks that others hold."""
        holders = sorted(self._roster.prefilling.values(), key=urgency)
        looked_at = [c for c in self._roster.candidates[:MAX_LOOKED_AT] if not c.block_ids]
        might_fit, may_start = self._roster.memory.might_fit, self._roster.may_start
        fitting = [c for c in looked_at if might_fit(c) and may_start(c)]
        fitting = sorted([*holders, *fitting], key=urgency)
        current = self._roster.current()
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

    def _start_overdue(self) -> None:
        """Give skipped requests their blocks as soon as they fit, whoever ranks first by now.

        They are parked at their start then, and newcomers may start and rank before them again.
        """
        while (request := self._roster.overdue()) and self._roster.start(request, may_evict=True):
            self._roster.new_task([request])

    def _try_start_task(self, request: Tracked, now_s: float, *, may_evict: bool = True) -> bool:
        """Start a waiting request and those that are packed with it."""
        if not self._roster.start(request, may_evict=may_evict):
            return False
        members = [request]
        max_tokens = self._options.max_pack_tokens
        if max_tokens is None:
            max_tokens = self._predictor.saturation_tokens
        num_tokens = request.num_input_tokens - request.num_cached_tokens
        if self._roster.waiting and num_tokens < max_tokens:
            members += joiners(
                request,
                (c for c in self._roster.candidates if not c.block_ids),
                max_tokens=max_tokens,
                max_requests=self._options.max_num_seqs,
                now_s=now_s,
                reserve=self._try_join,
            )
        self._roster.new_task(members)
        return True

    def _try_join(self, request: Tracked) -> bool:
        return self._roster.may_start(request) and self._roster.start(request, may_evict=False)

    def _switch_to(self, prefill: Tracked) -> PrefillTask:
        task_id, roster = prefill.task_id, self._roster
        assert task_id is not None
        if roster.current_task not in (None, task_id):
            for request in roster.members(roster.current_task):
                request.num_preemptions += 1
            self._num_preemptions += 1
        self._may_switch = False
        return PrefillTask(task_id, tuple(request.req_id for request in roster.run(task_id)))

    def _prefill_timer_s(self, prefill: Tracked, now_s: float, stretch: float) -> float | None:
        """The first of: late prefills' share, overrun; if anyone else wants the device."""
        if len(self._roster.candidates) <= prefill.num_packed:
            return None
        min_s = self._options.max_slice_s
        expected_s = prefill.remaining_s * stretch
        overrun_s = max(expected_s * (OVERRUN_FACTOR - 1), min_s * MIN_OVERRUN_SLICES)
        timer_s = now_s + expected_s + overrun_s
        wake_s = None
        if self._can_starve():
            wake_s = self._guard.wake_s(now_s, min_s, self._roster.candidates)
        return timer_s if wake_s is None else min(timer_s, wake_s)
