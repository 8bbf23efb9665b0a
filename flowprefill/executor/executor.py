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
    """When its first slice started."""
    busy_s: float
    predicted_s: float


class Executor:
    """Runs one pass at a time on one device."""

    def __init__(self, device: Device, clock: Clock, cost: SliceCost) -> None:
        self._device = device
        self._clock = clock
        self._cost = cost
        self.num_slices = 0
        """Slices run since the start, those of one call counted once (Interrupt counts the others);
        readable from any thread."""

    def run(
        self, state: ProgramState, interrupt: Interrupt, until_s: float = math.inf
    ) -> RunReport:
        """Run until the pass is done, or at a boundary the interrupt is due or the time is over."""
        started_s = self._clock.now_s()
        interrupt.start(until_s)
        expected_s = state.remaining_s(self._cost)
        while not state.is_done:
            predicted_s = self._cost(state.next_slice)
            may_leave = self._device.run(state.run_slice, predicted_s, interrupt)
            self.num_slices += 1
            if may_leave and interrupt.must_leave():
                break
        predicted_s = expected_s - state.remaining_s(self._cost)
        if state.is_done:
            self._device.wait()
        busy_s = self._clock.now_s() - started_s
        return RunReport(state.is_done, started_s, busy_s, predicted_s)
