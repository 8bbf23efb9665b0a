"""HookedPredictor, and the passes at load that it is made of.

A forward pass of num_slices boundaries and ends counts as so many equal slices of Group.LAYERS: its
seconds are linear in the rows (with knots), and in the keys that all rows read together.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flowprefill.clock import Clock
from flowprefill.executor.device import Device
from flowprefill.granularity import Granularity
from flowprefill.hooks.program import HookedProgram
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.predictor.fitted import FittedPredictor, fit
from flowprefill.predictor.profile import Profile
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import Group, KeyTiles, Slice, SliceLimits

LIMITS = SliceLimits(tile_rows=1, attention_work=1 << 60, key_tiles=KeyTiles((), 1))
"""Of the features only: keys count one by one, and decode steps have no attention of their own."""
ROUNDS = 2
PASS_S = 0.5
"""A prompt twice as long is not timed any more once one took so long."""
_SHOWS_ROWS = 128
"""Tokens of the shortest prompt that may be the last: one token's pass shows what reading the
weights takes, not what more rows do."""
_LENGTHS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_DECODE_BATCHES = (4, 16)
_STEADY = 1.4
"""Slowest over quickest round, of half the passes, up to which a profile is steady."""
_NO_CHOICES = [(1, 0.0)]
"""Choosing a token is quick beside such a pass, and not timed."""
_WHOLE = Granularity("whole")


class HookedPredictor(FittedPredictor):
    """Predicts the passes of a HookedProgram."""

    def __init__(
        self,
        coefficients: Mapping[str, Sequence[float]],
        program: HookedProgram,
        granularity: Granularity,
    ) -> None:
        num_slices = program.lm.num_slices
        super().__init__(coefficients, num_slices, LIMITS, granularity)
        self._num_slices = num_slices
        self._pass_tokens = program.pass_tokens(granularity)
        self._is_batched = program.lm.is_batched

    @property
    def saturation_tokens(self) -> int:
        """One: prompts are not packed."""
        return 1

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        size = self._pass_tokens or max(num_tokens, 1)
        whole, rest = divmod(num_tokens - num_cached_tokens, size)
        # the rows of all whole passes read, on average, what those of the middle one do
        total = whole * self._pass_s(size, num_cached_tokens + (whole - 1) * size / 2)
        if rest:
            total += self._pass_s(rest, num_tokens - rest)
        return self.speed_factor * total

    def packed_prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        return sum(self.prefill_s(*prompt) for prompt in prompts)

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        if self._is_batched or not num_seqs:
            return super().decode_step_s(num_seqs, num_context_tokens)
        return num_seqs * super().decode_step_s(1, num_context_tokens // num_seqs)

    def _pass_s(self, rows: int, start: float) -> float:
        num_keys = int(rows * start) + rows * (rows + 1) // 2
        piece = Slice(Group.LAYERS, 0, rows, num_keys=num_keys, num_layers=self._num_slices)
        return self.profiled_s(piece)


def make_predictor(
    profile: Profile, program: HookedProgram, granularity: Granularity
) -> HookedPredictor:
    """A predictor of what the profile showed."""
    return HookedPredictor(fit(profile.samples, LIMITS.key_tiles), program, granularity)


class HookedProfiler:
    """Times passes of random tokens."""

    def __init__(
        self,
        program: HookedProgram,
        device: Device,
        clock: Clock,
        new_tables: Callable[[int, int], list[BlockTable]],
        vocab_size: int,
    ) -> None:
        """new_tables(sequences, tokens): blocks of so many sequences; [] = they do not fit"""
        self._program = program
        self._device = device
        self._clock = clock
        self._never = Interrupt(clock)
        self._new_tables = new_tables
        self._tokens = random.Random(0).choices(range(vocab_size), k=_LENGTHS[-1])

    def warm_up(self, max_tokens: int) -> None:
        """First calls initialise what torch keeps: nobody should wait for them later."""
        self._run(self._prefill(min(16, max_tokens - 1)))

    def profile(self, max_tokens: int, on_progress: Callable[[float], None]) -> Profile:
        """max_tokens: the longest sequence that fits into the model and the cache."""
        start_s = self._clock.now_s()
        times: dict[Slice, list[float]] = {}
        self.warm_up(max_tokens)
        lengths = [n for n in _LENGTHS if n < max_tokens] or [max_tokens - 1]
        for done, length in enumerate(lengths):
            seconds = [self._time(times, self._prefill(length)) for _ in range(ROUNDS)]
            on_progress((done + 1) / (len(lengths) + 1))
            if min(seconds) > PASS_S and length >= _SHOWS_ROWS:
                break
        longest = length
        for batch in (1, *(_DECODE_BATCHES if self._program.lm.is_batched else ())):
            self._time_decode(times, batch, min(16, longest))
        self._time_decode(times, 1, longest)
        on_progress(1.0)
        samples = [(piece, min(found)) for piece, found in times.items()]
        spreads = [max(found) / min(found) for found in times.values() if min(found) > 0]
        is_steady = not spreads or statistics.median(spreads) <= _STEADY
        calibration_s = self._clock.now_s() - start_s
        return Profile(samples, _NO_CHOICES, False, calibration_s, is_steady)

    def _time_decode(self, times: dict[Slice, list[float]], batch: int, context: int) -> None:
        tables = self._new_tables(batch, context + ROUNDS)
        if not tables:
            return  # the cache does not hold so many
        for table in tables:
            self._run(self._program.prefill([self._input(context, table)], _WHOLE))
        for i in range(ROUNDS):
            inputs = [SequenceInput([self._tokens[0]], context + i, t) for t in tables]
            self._time(times, self._program.decode(inputs), same=i > 0)

    def _time(
        self, times: dict[Slice, list[float]], state: ProgramState, same: bool = False
    ) -> float:
        piece = replace(state.next_slice, num_layers=self._program.lm.num_slices)
        started_s = self._clock.now_s()
        self._run(state)
        seconds = self._clock.now_s() - started_s
        key = next(reversed(times)) if same else piece  # a step has one key more than the last
        times.setdefault(key, []).append(seconds)
        return seconds

    def _run(self, state: ProgramState) -> None:
        while not state.is_done:
            self._device.run(state.run_slice, 0.0, self._never)
        self._device.wait()  # for all of them: a launched slice may not have run yet

    def _prefill(self, length: int) -> ProgramState:
        [table] = self._new_tables(1, length)
        return self._program.prefill([self._input(length, table)], _WHOLE)

    def _input(self, length: int, table: BlockTable) -> SequenceInput:
        return SequenceInput(self._tokens[:length], 0, table)
