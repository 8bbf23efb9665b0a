"""Roster: where each live request stands - waiting, prefilling, decoding - and in which prefill.

It moves requests between these places with their KV blocks and their predictions, and knows nothing
of who should be moved: that is the Scheduler's.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Sequence
from operator import attrgetter

from flowprefill.predictor.base import Predictor
from flowprefill.request import RequestStatus
from flowprefill.scheduler.memory import KVMemory
from flowprefill.scheduler.tracked import Tracked

MAX_SKIPS = 16
"""Requests that may start before one that ranked first but found too few free blocks."""

urgency = attrgetter("urgency")


class Roster:
    """All live requests, their prefills and their places."""

    def __init__(self, memory: KVMemory, predictor: Predictor) -> None:
        self.memory = memory
        self._predictor = predictor
        self.requests: dict[int, Tracked] = {}
        """All live ones; each is in one of the next three."""
        self.waiting: dict[int, Tracked] = {}
        self.prefilling: dict[int, Tracked] = {}
        self.decoding: dict[int, Tracked] = {}
        self.candidates: list[Tracked] = []
        """Waiting and prefilling, in the order of urgency."""
        self.tasks: dict[int, list[int]] = {}
        """Unfinished prefill -> its live requests."""
        self.current_task: int | None = None
        """The unfinished prefill that ran last."""
        self._next_task_id = itertools.count()
        self._left_blocks: dict[int, list[int]] = {}  # of members that left a packed prefill
        self._num_skips: dict[int, int] = {}  # by request that ranked first but did not fit
        self._evicted: list[int] = []  # since take_evicted

    # ---- questions ----------------------------------------------------------------------------

    def members(self, task_id: int | None) -> list[Tracked]:
        """The live requests of an unfinished prefill; none if it is over."""
        if task_id is None:
            return []
        return [self.requests[req_id] for req_id in self.tasks.get(task_id, ())]

    def current(self) -> Tracked | None:
        """One of the requests of the prefill that ran last, if it is unfinished."""
        return next(iter(self.members(self.current_task)), None)

    def overdue(self) -> Tracked | None:
        """The waiting request with the first claim, of those skipped over often enough."""
        overdue = (self.waiting[i] for i, num in self._num_skips.items() if num >= MAX_SKIPS)
        return min(overdue, key=self.memory.claim, default=None)

    def may_start(self, request: Tracked) -> bool:
        """Whether it need not leave the free blocks to one that is overdue."""
        overdue = self.overdue()
        claim = self.memory.claim
        return overdue is None or claim(request) <= claim(overdue)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every live request is in one place and holds its blocks."""
        places = [*self.waiting, *self.prefilling, *self.decoding]
        assert sorted(places) == sorted(self.requests), "a request is lost or in two places"
        in_tasks = [req_id for members in self.tasks.values() for req_id in members]
        assert sorted(in_tasks) == sorted(self.prefilling), "tasks and prefills disagree"
        for members in self.tasks.values():
            assert all(self.requests[i].num_packed == len(members) for i in members)
        order = sorted([*self.waiting.values(), *self.prefilling.values()], key=urgency)
        assert order == self.candidates, "candidates are not the unfinished prefills in order"
        for request in self.requests.values():
            assert bool(request.block_ids) == (request.status is not RequestStatus.WAITING)
        assert set(self._num_skips) <= set(self.waiting)
        assert self.current_task is None or self.current_task in self.tasks
        assert set(self._left_blocks) <= set(self.tasks)
        held = [request.block_ids for request in self.requests.values()]
        self.memory.check_integrity([*held, *self._left_blocks.values()])

    # ---- from place to place ------------------------------------------------------------------

    def add(self, request: Tracked) -> None:
        """A new request waits."""
        assert request.req_id not in self.requests, f"request {request.req_id} arrived twice"
        assert self.memory.blocks_for(request) <= self.memory.num_blocks, (
            f"request {request.req_id} can never fit"
        )
        self._predict(request)
        self.requests[request.req_id] = self.waiting[request.req_id] = request
        insort(self.candidates, request, key=urgency)

    def start(self, request: Tracked, *, may_evict: bool) -> bool:
        """Give a waiting request the blocks of its prefill. False if there is no room.

        It is then to be put into a task.
        """
        victims = self.memory.start(request, self._holders() if may_evict else [])
        if victims is None:
            return False
        self._evict(victims)
        request.remaining_s = self._predictor.prefill_s(
            request.num_input_tokens, request.num_cached_tokens
        )
        request.status = RequestStatus.PREEMPTED
        self.prefilling[request.req_id] = self.waiting.pop(request.req_id)
        self._num_skips.pop(request.req_id, None)
        for req_id in self._num_skips:
            self._num_skips[req_id] += 1
        return True

    def skip(self, request: Tracked) -> None:
        """It ranked first but found too few blocks: count who starts before it from now on."""
        self._num_skips.setdefault(request.req_id, 0)

    def new_task(self, members: Sequence[Tracked]) -> None:
        """A prefill, parked at its start, of requests that hold their blocks."""
        task_id = next(self._next_task_id)
        self.tasks[task_id] = [request.req_id for request in members]
        prefill_s = members[0].remaining_s
        if len(members) > 1:
            shapes = [(r.num_input_tokens, r.num_cached_tokens) for r in members]
            prefill_s = self._predictor.packed_prefill_s(shapes)
        for request in members:
            request.task_id = task_id
            request.num_packed = len(members)
            request.prefill_s = request.remaining_s = prefill_s

    def run(self, task_id: int) -> list[Tracked]:
        """A prefill gets the device; the one that had it keeps its place and its blocks."""
        self.pause()
        members = self.members(task_id)
        for request in members:
            request.status = RequestStatus.RUNNING
        self.current_task = task_id
        return members

    def pause(self) -> None:
        """The unfinished prefill that ran last does not have the device."""
        for request in self.members(self.current_task):
            request.status = RequestStatus.PREEMPTED

    def finish_prefill(self, task_id: int, now_s: float) -> list[Tracked]:
        """Its requests have their next token, and decode."""
        members = self.members(task_id)
        for request in members:
            del self.prefilling[request.req_id]
            self._remove_candidate(request)
            self.decoding[request.req_id] = request
            request.status = RequestStatus.DECODING
            request.num_context_tokens = request.num_input_tokens
            request.remaining_s = 0.0
            request.give_token(now_s)
            self.memory.publish(request, request.prefix_keys)
        if members:
            self._drop_task(task_id)
        return members

    def grow(self, sequences: Sequence[Tracked]) -> bool:
        """Room for one more token of each decoding sequence. False if some lost theirs."""
        evicted = self.memory.grow(sequences, self._holders)
        self._evict(evicted)
        return not evicted

    def take_evicted(self) -> tuple[int, ...]:
        """Who lost its blocks since the last call."""
        evicted, self._evicted = tuple(self._evicted), []
        return evicted

    def forget(self, req_id: int, prefix_keys: Sequence[Hashable] = ()) -> Tracked | None:
        """A request has ended. prefix_keys: of the full blocks that it has written."""
        request = self.requests.pop(req_id, None)
        if request is None:
            return None
        if req_id in self.decoding:
            del self.decoding[req_id]
            self.memory.publish(request, prefix_keys)
        else:
            self._remove_candidate(request)
            self.waiting.pop(req_id, None)
            self.prefilling.pop(req_id, None)
        self._num_skips.pop(req_id, None)
        if not self._leave_pack(request):
            self.memory.free(request.block_ids)
        return request

    def _leave_pack(self, request: Tracked) -> bool:
        """It leaves its prefill. True if that goes on for others, and writes its rows too."""
        task_id = request.task_id
        if task_id is None:
            return False
        self.tasks[task_id].remove(request.req_id)
        for member in self.members(task_id):
            member.num_packed -= 1
        if not self.tasks[task_id]:
            self._drop_task(task_id)
            return False
        self._left_blocks.setdefault(task_id, []).extend(request.block_ids)
        return True

    def _evict(self, victims: Iterable[Tracked]) -> None:
        """These have lost their blocks; they wait for their next start."""
        for request in victims:
            self._evicted.append(request.req_id)
            if self.decoding.pop(request.req_id, None):
                # The last token's KV was never written: it is the input's last one.
                request.num_input_tokens = request.num_context_tokens + 1
                insort(self.candidates, request, key=urgency)
            elif request.task_id is not None:
                task_id = request.task_id
                for member in self.members(task_id):
                    del self.prefilling[member.req_id]
                self._drop_task(task_id)
            request.status = RequestStatus.WAITING
            request.num_cached_tokens = 0
            request.prefill_s = 0.0
            self.waiting[request.req_id] = request
            self._predict(request)

    def _predict(self, request: Tracked) -> None:
        """Its prefill from the start, with what of it is cached now."""
        num_cached = len(self.memory.cached_blocks(request)) * self.memory.block_size
        request.remaining_s = self._predictor.prefill_s(request.num_input_tokens, num_cached)

    def _holders(self) -> list[list[Tracked]]:
        """Who holds blocks, in groups that lose them together."""
        prefills = [self.members(task_id) for task_id in self.tasks]
        return [*prefills, *([request] for request in self.decoding.values())]

    def _remove_candidate(self, request: Tracked) -> None:
        index = bisect_left(self.candidates, request.urgency, key=urgency)
        assert self.candidates[index] is request
        del self.candidates[index]

    def _drop_task(self, task_id: int) -> None:
        """The prefill is over, one way or the other."""
        for request in self.members(task_id):
            request.task_id = None
            request.num_packed = 1
        del self.tasks[task_id]
        self.memory.free(self._left_blocks.pop(task_id, []))
        if self.current_task == task_id:
            self.current_task = None
