"""Whole passes of a program, for tests: blocks of one's own for each sequence, run to the end."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel, load_model
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import SliceLimits
from tests.native_kernels import require_native

WHOLE = Granularity("whole")
TILE = Granularity("tile")
CPU = torch.device("cpu")


def load_quietly(
    path: Path, dtype: str = "float32", limits: SliceLimits | None = None, **config: Any
) -> LoadedModel:
    """load_model on one CPU thread. limits: instead of the device's, so that a tiny model has
    several tiles. With kernels="native", skips the test where there are none.
    """
    if config.get("kernels") == "native":
        require_native(dtype)
    settings = EngineConfig(
        model=str(path), dtype=dtype, device="cpu", **{"num_threads": 1, **config}
    )
    model = load_model(settings, lambda stage, fraction: None)
    if limits is not None:
        model.program.limits = limits
    return model


def random_tokens(count: int, vocab_size: int = 256, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def run_to_end(state: ProgramState) -> Tensor:
    while not state.is_done:
        state.run_slice()
    return state.logits


class Runner:
    """Passes of one loaded model. Sequence i owns the i-th share of the cache's blocks, in an order
    of its own."""

    def __init__(self, model: LoadedModel, num_sequences: int = 4) -> None:
        self.model = model
        self.program = model.program
        share = model.cache.num_blocks // num_sequences
        blocks = list(range(model.cache.num_blocks))
        random.Random(0).shuffle(blocks)
        self.tables = [
            BlockTable(blocks[i * share : (i + 1) * share], model.cache.block_size, CPU)
            for i in range(num_sequences)
        ]

    def input(self, tokens: Sequence[int], start: int = 0, sequence: int = 0) -> SequenceInput:
        return SequenceInput(tokens, start, self.tables[sequence])

    def prefill(
        self,
        tokens: Sequence[int],
        granularity: Granularity = WHOLE,
        *,
        start: int = 0,
        sequence: int = 0,
    ) -> Tensor:
        """Logits [vocab] of the last token. tokens: those at positions start and after."""
        inputs = [self.input(tokens, start, sequence)]
        return run_to_end(self.program.prefill(inputs, granularity))[0]

    def decode(self, token: int, position: int, sequence: int = 0) -> Tensor:
        """Logits [vocab] of one decode step of one sequence."""
        return run_to_end(self.program.decode([self.input([token], position, sequence)]))[0]

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> tuple[Tensor, list[int]]:
        """First-token logits, and the greedy continuation by prefill and decode steps."""
        first = logits = self.prefill(prompt, TILE)
        tokens = [int(logits.argmax())]
        while len(tokens) < num_tokens:
            logits = self.decode(tokens[-1], len(prompt) + len(tokens) - 1)
            tokens.append(int(logits.argmax()))
        return first, tokens

    def kv(self, num_tokens: int, sequence: int = 0) -> Tensor:
        """K and V of the first tokens of a sequence in all layers."""
        slots = self.tables[sequence].slots(0, num_tokens)
        return self.model.cache.read(slots)
