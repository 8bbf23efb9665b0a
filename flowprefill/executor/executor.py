"""Executor: runs a pass slice by slice, leaves it at a boundary when asked. Knows no scheduler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flowprefill.clock import Clock
from flowprefill.executor.device import Device
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
        """Slices run since the start; a sign of life, readable from any thread."""

    def run(self, state: ProgramState, should_leave: Callable[[], bool]) -> RunReport:
        """Run until the pass is done, or until should_leave() at a boundary."""
        started_s = self._clock.now_s()
        predicted_s = 0.0
        while not state.is_done:
            predicted = self._cost(state.next_slice)
            predicted_s += predicted
            may_leave = self._device.run(state.run_slice, predicted)
            self.num_slices += 1
            if may_leave and should_leave():
                break
        if state.is_done:
            self._device.wait()
        busy_s = self._clock.now_s() - started_s
        return RunReport(state.is_done, started_s, busy_s, predicted_s)
