"""Operators: what the slices of a decoder are made of, and what they work on.

A pass owns its rows (residual stream, queries, positions); the operators own weights and KV cache.
TorchOperators runs anywhere; NativeOperators is the quick path of a CPU, TritonOperators of CUDA.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache
from flowprefill.kv.host_copies import to_device


@dataclass(frozen=True)
class Rows:
    """Token rows: where they stand in their sequences, and where their K and V go."""

    positions: Tensor
    """[num_rows] int64."""
    slots: Tensor
    """[num_rows] int64."""

    def __getitem__(self, rows: slice | Tensor) -> Rows:
        return Rows(self.positions[rows], self.slots[rows])


@dataclass(frozen=True)
class Addresses:
    """Of block tables, in memory."""

    tables: array[int]
    first: array[int]
    ids: Sequence[Tensor]
    """What the tables hold; kept, should one get longer elsewhere meanwhile."""


@dataclass(frozen=True)
class Attended:
    """Sequences of each of which consecutive query rows attend, packed in this order."""

    tables: Sequence[BlockTable]
    first: Sequence[int]
    """Position of each sequence's first query row."""
    is_newest: bool = False
    """Of each sequence its newest token alone: a decode step, or the head of a prefill."""
    num_rows: Sequence[int] = ()
    """Rows of each sequence; empty = the same number of each."""

    def rows_of_each(self, total: int) -> Sequence[int]:
        """total: query rows of all sequences"""
        num_seqs = len(self.tables)
        return self.num_rows or [total // num_seqs] * num_seqs

    @cached_property
    def addresses(self) -> Addresses:
        """The same, for kernels."""
        ids = [table.ids for table in self.tables]
        return Addresses(
            array("q", [tensor.data_ptr() for tensor in ids]), array("q", self.first), ids
        )

    def placed(self, total: int) -> Tensor:
        """The same on the tables' device, for kernels there: kernels.attention's `sequences`.

        total: query rows of all sequences
        """
        if total not in self._placed:
            edges = [0, *itertools.accumulate(self.rows_of_each(total))]
            tables, first = self.addresses.tables, self.first
            described = list(zip(tables, first, edges, edges[1:], strict=False))
            self._placed[total] = to_device(described, self.tables[0].ids.device)
        return self._placed[total]

    @cached_property
    def _placed(self) -> dict[int, Tensor]:
        return {}


Ends: TypeAlias = "array[int]"
"""int32: rows at which consecutive slices end, the first of which starts at row 0."""


def slice_ends(ends: Iterable[int]) -> Ends:
    return array("i", ends)


class SliceRun(NamedTuple):
    """Slices of one operator that one call may run, in order; the first one in any case."""

    ends: Ends
    interrupt: Interrupt | None = None
    """Is told of each slice that begins behind the first."""
    may_leave: bool = False
    """No further slice begins once the interrupt must be left."""


class Operators(Protocol):
    """One model's weights and KV cache on a device. `layer` counts from 0."""

    cache: KVCache
    runs_several_slices: bool
    """Whether one call may run more than the first slice of a SliceRun."""

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), hidden], a new tensor."""
        ...

    def qkv(self, layer: int, hidden: Tensor, rows: Rows, q: Tensor) -> None:
        """Norm, qkv projection, rope; K and V go into the cache.

        hidden: [num_rows, hidden]
        q: [num_rows, q_size], written: queries times query_scale
        """
        ...

    def attention(self, layer: int, q: Tensor, attended: Attended, run: SliceRun) -> int:
        """Overwrite queries by attention's output. Returns how many slices ran.

        q: [rows of all sequences, q_size], sequence by sequence
        attended: with different numbers of rows only where SliceLimits.packs_attention says so
        run: of several sequences one slice
        """
        ...

    def mlp(self, layer: int, hidden: Tensor, attended: Tensor, run: SliceRun) -> int:
        """Output projection, residual, norm, gated MLP, residual; `hidden` is overwritten.
        Returns how many slices ran.

        hidden: [num_rows, hidden]; attended: [num_rows, q_size]
        """
        ...

    def layers(
        self, layers: range, hidden: Tensor, rows: Rows, q: Tensor, attended: Attended
    ) -> None:
        """All of some layers, for one row of each sequence. Shapes as above."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Norm and LM head: [num_rows, hidden] behind the last layer -> [num_rows, vocab] fp32."""
        ...
