"""What rank 0 tells the other ranks of a pass, so that they build the same one. Plain data.

Block tables are told once and by what was added to them: a decode step would else repeat all block
ids of all its sequences with each token.
"""

from __future__ import annotations

import itertools
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import KeyTiles, SliceLimits


@dataclass(frozen=True)
class NewPass:
    """How to start a pass."""

    inputs: Sequence[SequenceInput]
    granularity: Granularity | None
    """None = a decode step."""
    limits: SliceLimits

    def start(self, program: DecoderProgram) -> ProgramState:
        """On this rank's program."""
        program.limits = self.limits
        if self.granularity is None:
            return program.decode(self.inputs)
        return program.prefill(self.inputs, self.granularity)


class PassWriter:
    """Of rank 0: passes -> messages, in the order in which they are sent."""

    def __init__(self, on_table_end: Callable[[int], None]) -> None:
        """on_table_end: called with the id of a block table that nobody has any more"""
        self._on_table_end = on_table_end
        self._table_ids = itertools.count()
        self._tables: weakref.WeakKeyDictionary[BlockTable, _Told] = weakref.WeakKeyDictionary()
        self._limits: SliceLimits | None = None

    def write(self, new: NewPass) -> list[Any]:
        """[granularity, limits or None = as before, inputs]"""
        limits = None if new.limits is self._limits else asdict(new.limits)
        self._limits = new.limits
        granularity = new.granularity and [new.granularity.kind, new.granularity.chunk_tokens]
        return [granularity, limits, [self._write_input(one) for one in new.inputs]]

    def _write_input(self, one: SequenceInput) -> list[Any]:
        told = self._tables.get(one.table)
        if told is None:
            told = self._tables[one.table] = _Told(next(self._table_ids))
            ending = weakref.finalize(one.table, self._on_table_end, told.table_id)
            ending.atexit = False
        added = one.table.block_ids(told.num_blocks)
        told.num_blocks += len(added)
        return [_to_bytes(one.token_ids), one.start, told.table_id, _to_bytes(added)]


@dataclass
class _Told:
    """What the other ranks know of a block table."""

    table_id: int
    num_blocks: int = 0


class PassReader:
    """Of another rank: messages -> passes."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self._tables: dict[int, BlockTable] = {}
        self._limits: SliceLimits | None = None

    def read(self, message: list[Any]) -> NewPass:
        granularity, limits, inputs = message
        if limits:
            self._limits = SliceLimits(**{**limits, "key_tiles": _key_tiles(limits["key_tiles"])})
        assert self._limits is not None, "the first pass brings them"
        parsed = [self._read_input(*one) for one in inputs]
        return NewPass(parsed, Granularity(*granularity) if granularity else None, self._limits)

    def forget_table(self, table_id: int) -> None:
        self._tables.pop(table_id, None)

    def _read_input(self, tokens: bytes, start: int, table_id: int, added: bytes) -> SequenceInput:
        table = self._tables.get(table_id)
        if table is None:
            table = BlockTable(_from_bytes(added), self._block_size, self._device)
            self._tables[table_id] = table
        elif added:
            table.extend(_from_bytes(added))
        return SequenceInput(_from_bytes(tokens), start, table)


def _key_tiles(values: dict[str, Any]) -> KeyTiles:
    return KeyTiles(tuple(values["first_edges"]), values["width"])


def _to_bytes(values: Sequence[int]) -> bytes:
    """Token and block ids, which fit into 32 bits."""
    return array("i", values).tobytes()


def _from_bytes(data: bytes) -> list[int]:
    return array("i", data).tolist()
