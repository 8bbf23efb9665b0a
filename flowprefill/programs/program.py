"""Program: the operators of one forward pass, handed out slice by slice.

A ProgramState is one pass in progress. It can be left after any slice and gone on with later:
cursor, KV blocks and live tensors are all it needs. The executor sees only these two protocols, so
a model that suspends its own forward pass can be a Program too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.slices import Slice

RunSlice = Callable[[Interrupt | None], bool]
"""ProgramState.run_slice."""

SliceCost = Callable[[Slice], float]
"""Predicted device seconds of one slice."""


@dataclass(frozen=True)
class SequenceInput:
    """Tokens of one sequence to compute, and where its KV lives."""

    token_ids: Sequence[int]
    """Tokens at positions start..start + len(token_ids)."""
    start: int
    """Tokens of the sequence whose KV is already in the cache."""
    table: BlockTable


class ProgramState(Protocol):
    """One forward pass in progress."""

    @property
    def is_done(self) -> bool: ...

    @property
    def next_slice(self) -> Slice:
        """The slice that run_slice will run."""
        ...

    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        """Run the next slice. True if the task may be left here (never true when it is done).

        interrupt: given, it may also run slices behind it, until the task must be left and may be
        """
        ...

    def remaining_s(self, cost: SliceCost) -> float:
        """Predicted device seconds from the cursor to the end."""
        ...

    @property
    def logits(self) -> Tensor:
        """[num_seqs, vocab] fp32, in the order of the input sequences, once is_done."""
        ...

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that a parked pass holds beside its KV blocks."""
        ...


class Program(Protocol):
    """A model that can start passes."""

    def prefill(self, inputs: Sequence[SequenceInput], granularity: Granularity) -> ProgramState:
        """Start the prefill of one or several prompts, packed."""
        ...

    def decode(self, inputs: Sequence[SequenceInput]) -> ProgramState:
        """Start a decode step: one token of each sequence."""
        ...
