"""Profile: run a few passes at load, time their slices, and probe the bit rule on the way."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from flowprefill.clock import Clock
from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import Program, ProgramState, SequenceInput
from flowprefill.programs.slices import Slice

_PROMPT_LENGTHS = (32, 100, 300, 700, 1400)
_DECODE_BATCHES = (1, 2, 4)
_PROBE_CHUNK = 96
_TILE = Granularity("tile")


@dataclass(frozen=True)
class Profile:
    """What the passes at load showed."""

    samples: list[tuple[Slice, float]]
    """Slices and their seconds."""
    is_bit_invariant: bool
    """Chunked prefill and decode gave the bits of the whole prefill."""


class Profiler:
    """Runs passes of random tokens on a program whose KV cache nobody uses yet."""

    def __init__(
        self,
        program: Program,
        run: Callable[[Callable[[], bool]], bool],
        clock: Clock,
        new_table: Callable[[int, int], BlockTable],
        vocab_size: int,
    ) -> None:
        """run: runs one slice to its end; new_table(index, tokens): blocks of sequence `index`."""
        self._program = program
        self._run = run
        self._clock = clock
        self._new_table = new_table
        self._tokens = random.Random(0).choices(range(vocab_size), k=max(_PROMPT_LENGTHS) + 1)
        self._samples: list[tuple[Slice, float]] = []

    def profile(self, max_tokens: int, on_progress: Callable[[float], None]) -> Profile:
        """max_tokens: the longest sequence that fits into the model and the cache."""
        self._prefill(min(16, max_tokens - 1))  # first calls initialise the operators' caches
        self._samples.clear()
        lengths = sorted({min(n, max_tokens - 1) for n in _PROMPT_LENGTHS})
        for i, length in enumerate(lengths):
            self._prefill(length)
            on_progress((i + 1) / (len(lengths) + 2))
        for num_seqs in _DECODE_BATCHES:
            self._decode([max(1, lengths[-1] // num_seqs)] * num_seqs)
            self._decode([max(1, lengths[0] // num_seqs)] * num_seqs)
        on_progress((len(lengths) + 1) / (len(lengths) + 2))
        invariant = self._probe(min(300, max_tokens - 1))
        on_progress(1.0)
        return Profile(self._samples, invariant)

    def _prefill(self, length: int, granularity: Granularity = _TILE) -> Tensor:
        tokens = self._tokens[:length]
        table = self._new_table(0, length + 1)
        return self._finish(self._program.prefill([SequenceInput(tokens, 0, table)], granularity))

    def _decode(self, contexts: Sequence[int]) -> Tensor:
        """One step; the caches hold whatever earlier passes left there."""
        inputs = [
            SequenceInput(self._tokens[n : n + 1], n, self._new_table(i, n + 1))
            for i, n in enumerate(contexts)
        ]
        return self._finish(self._program.decode(inputs))

    def _probe(self, length: int) -> bool:
        """Whether the last row has the same bits in one pass, in chunks, and as a decode row."""
        whole = self._prefill(length)
        chunked = self._prefill(length, Granularity("chunk", _PROBE_CHUNK))
        decoded = self._decode([length - 1])
        return bool((whole == chunked).all()) and bool((whole == decoded).all())

    def _finish(self, state: ProgramState) -> Tensor:
        while not state.is_done:
            piece = state.next_slice
            start_s = self._clock.now_s()
            self._run(state.run_slice)
            self._samples.append((piece, self._clock.now_s() - start_s))
        return state.logits
