"""Recorder: notes what an engine runs on its device, for a timeline. Knows no scheduler.

An engine that has none pays one look per stretch of a pass. Operator groups are timed call by call,
and a call, also a native one of several slices, is of one group; within it the slices are taken to
be equally long. On CUDA a call launches, so the group's times are those of its launch, ahead of the
device by the launch window, and so is the end of a run that is left midway; where runs begin, and
where a pass is done, is exact on any device.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from flowprefill.clock import Clock
from flowprefill.executor.executor import RunReport
from flowprefill.interrupt import Interrupt
from flowprefill.programs.program import ProgramState, SliceCost
from flowprefill.programs.slices import Slice
from flowprefill.request import Request
from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup

MAX_RECORDS = 200_000
"""Of a timeline that is taken in parts: 10 MB or so on the way to its reader."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Slices of one operator group that one call ran."""

    name: str
    start_s: float
    end_s: float
    num_slices: int


class Recorder:
    """Give it to Engine.record. Filled on the engine's thread; some hundred records per prompt."""

    def __init__(self, clock: Clock, max_records: float = math.inf) -> None:
        """clock: the engine's, whose times are noted. max_records: runs, operator groups and first
        tokens that it notes in its life."""
        self.runs: list[DeviceRun] = []
        """What the device did, in order, without overlaps."""
        self.spans: list[RequestSpan] = []
        """Requests that got their first token."""
        self._clock = clock
        self._num_left = max_records
        self._lock = threading.Lock()
        self._watched: WatchedState | None = None

    @property
    def is_full(self) -> bool:
        """It notes no more."""
        return self._num_left <= 0

    def watch(
        self, task_id: int | None, req_ids: tuple[int, ...], state: ProgramState
    ) -> WatchedState:
        """The pass, to be run in its stead until note_run.

        task_id: of a prefill; None = a decode step
        """
        self._watched = WatchedState(state, self._clock, task_id, req_ids)
        return self._watched

    def note_run(self, watched: WatchedState, run: RunReport) -> None:
        """A stretch of a pass has ended."""
        noted = watched.noted(run.started_s, run.started_s + run.busy_s, run.is_done)
        with self._lock:
            self._watched = None
            self._add(noted)

    def take(self, with_running: bool) -> list[DeviceRun]:
        """The runs so far, which are forgotten here, as first tokens are. From any thread.

        with_running: also what the device has done of a stretch that has not ended
        """
        with self._lock:
            watched = self._watched
            if with_running and watched and watched.calls:
                self._add(watched.noted(watched.calls[0].start_s, watched.calls[-1].end_s, False))
            taken, self.runs = self.runs, []
            self.spans.clear()
        return taken

    def note_first_token(self, request: Request, time_s: float) -> None:
        if self.is_full:
            return
        self._num_left -= 1
        self.spans.append(
            RequestSpan(
                request.req_id,
                request.slo.name,
                len(request.prompt_token_ids),
                request.arrival_s,
                time_s,
                request.arrival_s + request.slo.ttft_s,
            )
        )

    def _add(self, run: DeviceRun) -> None:
        if not self.is_full:
            self._num_left -= 1 + len(run.slices)
            self.runs.append(run)


class PartedTimeline:
    """A recording that is taken part by part while it goes on."""

    def __init__(self, clock: Clock, record: Callable[[Recorder | None], None]) -> None:
        """record: Engine.record"""
        self._clock = clock
        self._record = record
        self._recorder: Recorder | None = None

    def take(self, goes_on: bool) -> tuple[list[DeviceRun], bool]:
        """What the device did since the last call, and whether there is too much to go on.

        The first call begins a recording and returns nothing. goes_on=False ends it; that call also
        returns what has run of a stretch that has not ended.
        """
        recorder, self._recorder = self._recorder, None
        if goes_on:
            self._recorder = recorder or Recorder(self._clock, MAX_RECORDS)
        if self._recorder is not recorder:
            self._record(self._recorder)
        if recorder is None:
            return [], False
        return recorder.take(with_running=not goes_on), recorder.is_full


@dataclass
class WatchedState:
    """A ProgramState that times the calls of its slices."""

    state: ProgramState
    clock: Clock
    task_id: int | None
    req_ids: tuple[int, ...]
    calls: list[_Call] = field(default_factory=list)

    def noted(self, start_s: float, end_s: float, is_done: bool) -> DeviceRun:
        """What it ran. Of a decode step without its groups, which nobody looks at."""
        groups = [] if self.task_id is None else _groups(list(self.calls))
        return DeviceRun(self.task_id, self.req_ids, start_s, end_s, is_done, groups)

    @property
    def is_done(self) -> bool:
        return self.state.is_done

    @property
    def next_slice(self) -> Slice:
        return self.state.next_slice

    @property
    def logits(self) -> Tensor:
        return self.state.logits

    @property
    def live_bytes(self) -> int:
        return self.state.live_bytes

    def remaining_s(self, cost: SliceCost) -> float:
        return self.state.remaining_s(cost)

    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        """See ProgramState."""
        name = self.state.next_slice.group.value
        num_before = interrupt.num_more_slices if interrupt else 0
        start_s = self.clock.now_s()
        may_leave = self.state.run_slice(interrupt)
        end_s = self.clock.now_s()
        num_more = interrupt.num_more_slices - num_before if interrupt else 0
        self.calls.append(_Call(name, start_s, end_s, 1 + num_more))
        return may_leave


def _groups(calls: list[_Call]) -> list[SliceGroup]:
    """Calls of the same group behind each other are one."""
    groups = []
    for name, found in itertools.groupby(calls, key=lambda call: call.name):
        same = list(found)
        start_s, end_s = same[0].start_s, same[-1].end_s
        slice_s = (end_s - start_s) / sum(call.num_slices for call in same)
        groups.append(SliceGroup(name, start_s, end_s, slice_s))
    return groups
