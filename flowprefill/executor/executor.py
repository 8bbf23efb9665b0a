"""Executor: runs a pass slice by slice, leaves it at a boundary when asked. Knows no scheduler."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowprefill.clock import Clock
from flowprefill.executor.device import Device
from flowprefill.interrupt import Interrupt
from flowprefill.programs.program import ProgramState, SliceCost


@dataclass(frozen=True)
class RunReport:
    """One stretch of a pass, from its start or resumption until it was left or done."""

    is_done: bool
    started_s: float
    """When its first slice started on the device."""
    busy_s: float
    """Until it was done, or left: what was launched by then may still run, and is in no stretch's
    time."""
    profiled_s: float
    """What the profile says of its slices."""


class Executor:
    """Runs one pass at a time on one device."""

    def __init__(self, device: Device, clock: Clock, cost: SliceCost) -> None:
        """cost: by the profile, so that the sums over a pass never change."""
        self._device = device
        self._clock = clock
        self._cost = cost
        self.num_slices = 0
        """Slices run since the start, those of one call counted once (Interrupt counts the others);
        readable from any thread."""
        self.longest_slice_s = 0.0
        """Profiled seconds of the longest slice since a pass was last done, so that those still in
        flight are among them; 0 = none. Readable from any thread."""

    def run(
        self, state: ProgramState, interrupt: Interrupt, until_s: float = math.inf
    ) -> RunReport:
        """Run until the pass is done, or until a boundary at which the interrupt is due or until_s
        has come."""
        before_s = state.remaining_s(self._cost)
        interrupt.begin_stretch(until_s)
        earlier = self._device.in_flight()
        started_s = self._clock.now_s()
        while not state.is_done:
            profiled_s = self._cost(state.next_slice)
            self.longest_slice_s = max(self.longest_slice_s, profiled_s)
            may_leave = self._device.run(state.run_slice, profiled_s, interrupt)
            self.num_slices += 1
            if earlier:
                # The first slice has been launched behind it, so the device does not idle. When
                # it starts is known only by waiting; queueing must enter neither blocking times
                # nor what is learnt of the device's speed.
                earlier.synchronize()
                started_s, earlier = self._clock.now_s(), None
            if may_leave and interrupt.must_leave():
                break
        if state.is_done:
            self._device.wait()
            self.longest_slice_s = 0.0
        busy_s = self._clock.now_s() - started_s
        profiled_s = before_s - state.remaining_s(self._cost)
        return RunReport(state.is_done, started_s, busy_s, profiled_s)
