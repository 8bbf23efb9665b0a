"""Recorder: notes what an engine runs on its device, for a timeline. Knows no scheduler.

An engine that has none pays one look per stretch of a pass. Operator groups are timed call by call,
and a call, also a native one of several slices, is of one group; within it the slices are taken to
be equally long. On CUDA a call launches, so the group's times are those of its launch, ahead of the
device by the launch window; where runs end is exact on any device.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from torch import Tensor

from flowprefill.clock import Clock
from flowprefill.executor.executor import RunReport
from flowprefill.interrupt import Interrupt
from flowprefill.programs.program import ProgramState, SliceCost
from flowprefill.programs.slices import Slice
from flowprefill.request import Request
from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup


@dataclass(frozen=True, slots=True)
class _Call:
    """Slices of one operator group that one call ran."""

    name: str
    start_s: float
    end_s: float
    num_slices: int


class Recorder:
    """Give it to Engine.record. Filled on the engine's thread; some hundred records per prompt."""

    def __init__(self, clock: Clock) -> None:
        """clock: the engine's, whose times are noted."""
        self.runs: list[DeviceRun] = []
        """What the device did, in order, without overlaps."""
        self.spans: list[RequestSpan] = []
        """Requests that got their first token."""
        self._clock = clock

    def watch(self, state: ProgramState) -> WatchedState:
        """The pass, to be run in its stead."""
        return WatchedState(state, self._clock)

    def note_run(
        self, task_id: int | None, req_ids: tuple[int, ...], watched: WatchedState, run: RunReport
    ) -> None:
        """A stretch of a pass has ended.

        task_id: of a prefill; None = a decode step
        """
        end_s = run.started_s + run.busy_s
        groups = _groups(watched.calls)
        self.runs.append(DeviceRun(task_id, req_ids, run.started_s, end_s, run.is_done, groups))

    def note_first_token(self, request: Request, time_s: float) -> None:
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


@dataclass
class WatchedState:
    """A ProgramState that times the calls of its slices."""

    state: ProgramState
    clock: Clock
    calls: list[_Call] = field(default_factory=list)

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
