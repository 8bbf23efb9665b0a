"""An asynchronous device in virtual time, and slice times of a real run to play on it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowprefill.clock import VirtualClock
from flowprefill.executor.launch_window import DeviceEvent, LaunchWindow
from flowprefill.interrupt import Interrupt
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.program import RunSlice
from flowprefill.programs.slices import SliceLimits


def recorded_slices() -> list[tuple[float, float]]:
    """(predicted, measured) seconds of each slice of a real prefill; the file says of which."""
    path = Path(__file__).with_name("recorded_slices.json")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return [(predicted_s, measured_s) for predicted_s, measured_s in recorded["slices"]]


class FakeStream:
    """A device that runs slices one after another in virtual time."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock = clock or VirtualClock()
        self.free_s: float | None = None
        """When the last launched slice ends; None before the first launch."""
        self.idle_s = 0.0
        self.starts_s: list[float] = []
        """When each slice starts."""

    @property
    def backlog_s(self) -> float:
        return max(0.0, (self.free_s or 0.0) - self.clock.now_s())

    def launch(self, duration_s: float) -> FakeEvent:
        now_s = self.clock.now_s()
        free_s = now_s if self.free_s is None else self.free_s
        self.idle_s += max(0.0, now_s - free_s)
        self.starts_s.append(max(now_s, free_s))
        self.free_s = self.starts_s[-1] + duration_s
        return FakeEvent(self.clock, self.free_s)


class FakeEvent:
    """The end of one slice. Synchronising is the only thing that takes the host's time."""

    def __init__(self, clock: VirtualClock, end_s: float) -> None:
        self._clock, self._end_s = clock, end_s

    def query(self) -> bool:
        return self._clock.now_s() >= self._end_s

    def synchronize(self) -> None:
        self._clock.advance_to(max(self._clock.now_s(), self._end_s))


class PretendedCard:
    """torch.cuda as CudaDevice uses it: what is launched runs on a FakeStream instead."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, durations: Iterable[float] = (), major: int = 8
    ) -> None:
        """durations: of the slices in the order of their launches; major: of its capability"""
        self.stream = FakeStream()
        remaining = iter(durations)

        class Event:
            def record(self, stream: FakeStream) -> None:
                self._end = stream.launch(next(remaining))

            def query(self) -> bool:
                return self._end.query()

            def synchronize(self) -> None:
                self._end.synchronize()

        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        cuda = {
            "is_available": lambda: True,
            "get_device_properties": lambda device: SimpleNamespace(major=major),
            "Stream": lambda device: self.stream,
            "set_stream": lambda stream: None,
            "Event": Event,
        }
        for name, stand_in in cuda.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


class AsyncDevice:
    """Launches slices on a FakeStream as CudaDevice does on its stream. Implements Device."""

    torch_device = torch.device("cpu")
    default_dtype = torch.float32
    num_threads = 1

    def __init__(
        self, stream: FakeStream, max_slice_s: float, durations: Iterable[float], launch_s: float
    ) -> None:
        """durations: of the slices in the order of their launches; launch_s: of each"""
        self._stream = stream
        self._window = LaunchWindow(max_slice_s)
        self._durations = iter(durations)
        self._launch_s = launch_s

    def slice_limits(
        self, spec: ModelSpec, dtype: torch.dtype, max_slice_s: float, is_native: bool
    ) -> SliceLimits:
        raise AssertionError("the executor has no use for it")

    def use_in_this_thread(self) -> None:
        pass

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        may_leave = run_slice(None)
        clock = self._stream.clock
        clock.advance_to(clock.now_s() + self._launch_s)
        self._window.launched(self._stream.launch(next(self._durations)), profiled_s)
        self._window.make_room()
        return may_leave

    def in_flight(self) -> DeviceEvent | None:
        self._window.forget_ended()
        return self._window.newest

    def wait(self) -> None:
        self._window.wait()
