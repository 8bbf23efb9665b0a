"""Profiler: runs passes at load, times their slices, and probes the bit rule on the way.

A slice's time depends on its shape, so the passes are chosen for their shapes: prompts of growing
length, short pieces late in a long context (whatever the cache holds there), decode steps. Longer
passes are left after some layers, which are all alike; quick ones run to their ends once, for the
logits. Everything runs in several rounds. Whatever else the machine does only adds to a time, so of
each shape the quickest round counts; where rounds disagree too much the profile is not steady.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor

from flowprefill.clock import Clock
from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.predictor.features import slice_features, slice_kind
from flowprefill.predictor.profile import Profile
from flowprefill.programs.program import Program, ProgramState, RunSlice, SequenceInput
from flowprefill.programs.slices import Group, Slice, SliceLimits, Span, max_decode_keys

ROUNDS = 3
PASS_S = 0.05
"""A pass is left at the next start of a layer when it has run so long."""
_SHORT_TOKENS = 64
_FIRST_CONTEXT = 512
_DECODE_BATCHES = (1, 4, 16)
_STEADY = 1.4
"""Slowest over quickest round, of half the shapes, up to which a profile is steady."""
_PROBE_TOKENS = 200
_PROBE_CHUNK = 96
_TILE = Granularity("tile")
_Shape = tuple[str, tuple[float, ...]]
"""Kind and features."""


class Profiler:
    """Runs passes of random tokens on a program whose KV cache nobody uses yet."""

    def __init__(
        self,
        program: Program,
        limits: SliceLimits,
        run: Callable[[RunSlice], bool],
        clock: Clock,
        new_table: Callable[[int, int], BlockTable],
        choose: Callable[[Tensor], object],
        vocab_size: int,
    ) -> None:
        """run: runs one slice to its end
        new_table(index, tokens): blocks of sequence `index`; sequences may share some
        choose: chooses a token for each row of logits
        """
        self._program = program
        self._limits = limits
        self._run = run
        self._clock = clock
        self._new_table = new_table
        self._choose = choose
        self._tokens = random.Random(0).choices(range(vocab_size), k=max(limits.tile_rows, 256))
        self._times: dict[_Shape, tuple[Slice, list[float]]] = {}
        self._choice_times: dict[int, list[float]] = {}

    def warm_up(self, max_tokens: int) -> None:
        """First calls initialise the operators' caches and compile what chooses tokens: nobody
        should wait for them later."""
        self._finish(self._prefill(Span(0, min(16, max_tokens - 1))))
        self._choose(self._finish(self._decode([max(1, min(16, max_tokens - 1))])))

    def profile(self, max_tokens: int, on_progress: Callable[[float], None]) -> Profile:
        """max_tokens: the longest sequence that fits into the model and the cache."""
        start_s = self._clock.now_s()
        self.warm_up(max_tokens)
        passes: list[Callable[[bool], None]] = [
            *[partial(self._time_prefill, s) for s in prefill_spans(self._limits, max_tokens)],
            *[partial(self._time_decode, c) for c in decode_batches(self._limits, max_tokens)],
        ]
        for i, time_pass in enumerate(passes * ROUNDS):
            time_pass(i < len(passes))
            on_progress((i + 1) / (ROUNDS * len(passes) + 1))
        is_invariant = self._probe(min(_PROBE_TOKENS, max_tokens - 1))
        on_progress(1.0)
        samples = [(piece, min(times)) for piece, times in self._times.values()]
        choices = [(rows, min(times)) for rows, times in sorted(self._choice_times.items())]
        spreads = [max(times) / min(times) for _, times in self._times.values() if min(times) > 0]
        is_steady = not spreads or statistics.median(spreads) <= _STEADY
        calibration_s = self._clock.now_s() - start_s
        return Profile(samples, choices, is_invariant, calibration_s, is_steady)

    def _time_prefill(self, span: Span, is_first_round: bool) -> None:
        """Matrix products of few rows behind long attention find no weights in the caches and are
        not typical: of a ragged piece late in a context only what depends on the context counts."""
        to_end = is_first_round and span.end - span.start <= (1 if span.start else _SHORT_TOKENS)
        timed = self._run_layers(self._prefill(span), to_end)
        if span.start:
            rows = self._limits.tile_rows
            products = (Group.QKV, Group.MLP)
            timed = [(p, s) for p, s in timed if p.group not in products or p.num_rows >= rows]
        self._note(timed)

    def _time_decode(self, contexts: Sequence[int], is_first_round: bool) -> None:
        state = self._decode(contexts)
        to_end = is_first_round and contexts[0] <= _SHORT_TOKENS
        self._note(self._run_layers(state, to_end))
        if state.is_done:
            started_s = self._clock.now_s()
            self._choose(state.logits)
            seconds = self._clock.now_s() - started_s
            self._choice_times.setdefault(len(contexts), []).append(seconds)

    def _run_layers(self, state: ProgramState, to_end: bool) -> list[tuple[Slice, float]]:
        """Run a pass to its end, or leave it after some layers. Returns its slices, timed."""
        timed: list[tuple[Slice, float]] = []
        left_s = PASS_S
        while not state.is_done:
            piece = state.next_slice
            is_new_layer = piece.group in (Group.QKV, Group.LAYERS) and piece.start == 0
            if is_new_layer and left_s < 0 and not to_end:
                break
            started_s = self._clock.now_s()
            self._run(state.run_slice)
            seconds = self._clock.now_s() - started_s
            left_s -= seconds
            timed.append((piece, seconds))
        return timed

    def _note(self, timed: Sequence[tuple[Slice, float]]) -> None:
        """Take in one pass. The first slice of each shape pays for what is cold, unlike the others
        of a prefill; it counts only where it is the only one."""
        by_shape: dict[_Shape, list[tuple[Slice, float]]] = {}
        for piece, seconds in timed:
            shape = slice_kind(piece), slice_features(piece, self._limits.key_tiles)
            by_shape.setdefault(shape, []).append((piece, seconds))
        for shape, found in by_shape.items():
            usual = found[1:] or found
            # where a task may be left is no part of the shape
            piece = replace(usual[0][0], is_boundary=False)
            seconds = statistics.median(s for _, s in usual)
            self._times.setdefault(shape, (piece, []))[1].append(seconds)

    def _probe(self, length: int) -> bool:
        """Whether the last row has the same bits in one pass, in chunks, and as a decode row."""
        whole = self._finish(self._prefill(Span(0, length)))
        chunked = self._finish(self._prefill(Span(0, length), Granularity("chunk", _PROBE_CHUNK)))
        decoded = self._finish(self._decode([length - 1]))
        return bool((whole == chunked).all()) and bool((whole == decoded).all())

    def _prefill(self, span: Span, granularity: Granularity = _TILE) -> ProgramState:
        tokens = self._tokens[: span.end - span.start]
        table = self._new_table(0, span.end)
        return self._program.prefill([SequenceInput(tokens, span.start, table)], granularity)

    def _decode(self, contexts: Sequence[int]) -> ProgramState:
        """One step; the caches hold whatever earlier passes left there."""
        inputs = []
        for i, context in enumerate(contexts):
            token = self._tokens[context % len(self._tokens)]
            inputs.append(SequenceInput([token], context, self._new_table(i, context + 1)))
        return self._program.decode(inputs)

    def _finish(self, state: ProgramState) -> Tensor:
        while not state.is_done:
            self._run(state.run_slice)
        return state.logits


def prefill_spans(limits: SliceLimits, max_tokens: int) -> list[Span]:
    """Token positions of the prefills that are timed; all end below max_tokens."""
    longest = max_tokens - 1
    lengths = [1, *_powers_of_two(16, limits.tile_rows), limits.tile_rows]
    spans = [Span(0, min(n, longest)) for n in lengths]
    for start in (*_powers_of_two(_FIRST_CONTEXT, longest), longest):
        # a slice as wide as attention may be there, and a narrow one behind it
        rows = limits.attention_rows(start)
        first = max(0, min(start, longest - rows) // rows * rows)
        num_rows = min(rows + rows // 4, limits.tile_rows)
        spans.append(Span(first, min(first + num_rows, longest)))
    spans += [Span(n - 1, n) for n in (_FIRST_CONTEXT, longest) if n <= longest]
    return list(dict.fromkeys(spans))


def decode_batches(limits: SliceLimits, max_tokens: int) -> list[list[int]]:
    """Cached tokens of each sequence, of the decode steps that are timed."""
    longest = max_tokens - 1
    contexts = {n: [_SHORT_TOKENS, longest // n] for n in _DECODE_BATCHES}
    # so many keys that attention has slices of its own, one sequence and several
    for n in _DECODE_BATCHES:
        if n * longest > max_decode_keys(limits):
            contexts[n] += [longest, max_decode_keys(limits) // n + 1]
    shapes = [(max(1, min(c, longest)), n) for n in _DECODE_BATCHES for c in contexts[n]]
    return [[context] * n for context, n in dict.fromkeys(shapes)]


def _powers_of_two(first: int, end: int) -> list[int]:
    """first, 2 * first, 4 * first .. below `end`."""
    return [first << i for i in range(64) if first << i < end]
