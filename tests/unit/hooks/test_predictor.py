"""What passes at load show, and what is predicted from it."""

from __future__ import annotations

import random

import pytest

from flowprefill.clock import MonotonicClock, VirtualClock
from flowprefill.executor.device import CpuDevice
from flowprefill.granularity import Granularity
from flowprefill.hooks.predictor import ROUNDS, HookedProfiler, make_predictor
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import RunSlice
from tests.unit.hooks.tiny import VOCAB, make_program, table


def new_tables(num_sequences: int, num_tokens: int) -> list[BlockTable]:
    return [table(i) for i in range(num_sequences)]


class CountingDevice(CpuDevice):
    """Counts what goes through it."""

    num_slices = 0

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        self.num_slices += 1
        return super().run(run_slice, profiled_s, interrupt)


def test_slices_are_timed_on_the_device_that_waits_for_them() -> None:
    """On CUDA wait() knows of launched slices only by those that run() has launched."""
    program, device = make_program("Llama"), CountingDevice(1)

    def new_tables(num_sequences: int, num_tokens: int) -> list[BlockTable]:
        return [table(i) for i in range(num_sequences)]

    profiler = HookedProfiler(program, device, MonotonicClock(), new_tables, VOCAB)
    profile = profiler.profile(64, lambda fraction: None)
    assert device.num_slices >= ROUNDS * program.lm.num_slices * len(profile.samples)


class SlowDevice(CpuDevice):
    """Its passes take 0.6 s and 20 ms for each row, give or take 2%, by a clock of its own."""

    def __init__(self, num_slices: int, seed: int) -> None:
        super().__init__(1)
        self.clock = VirtualClock()
        self._num_slices = num_slices
        self._draw = random.Random(seed)

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        num_rows = run_slice.__self__.next_slice.num_rows  # type: ignore[attr-defined]
        seconds = slow_pass_s(num_rows) / self._num_slices * self._draw.uniform(0.98, 1.02)
        self.clock.advance_to(self.clock.now_s() + seconds)
        return super().run(run_slice, profiled_s, interrupt)


def slow_pass_s(num_rows: int) -> float:
    return 0.6 + 0.02 * num_rows


@pytest.mark.parametrize("seed", range(5))
def test_what_rows_cost_is_seen_where_a_pass_of_one_token_is_slow(seed: int) -> None:
    program = make_program("Llama", max_position_embeddings=2048)
    device = SlowDevice(program.lm.num_slices, seed)
    profiler = HookedProfiler(program, device, device.clock, new_tables, VOCAB)
    profile = profiler.profile(2048, lambda fraction: None)
    predictor = make_predictor(profile, program, Granularity("whole"))
    assert 1 / 3 < predictor.prefill_s(2000) / slow_pass_s(2000) < 3
    assert profile.calibration_s < 60
