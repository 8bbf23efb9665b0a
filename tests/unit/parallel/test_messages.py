"""A pass that is read is the pass that was written, and block tables grow as rank 0's do."""

from __future__ import annotations

import gc
from typing import Any

import msgpack
import torch

from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.parallel.messages import NewPass, PassReader, PassWriter
from flowprefill.programs.program import SequenceInput
from flowprefill.programs.slices import KeyTiles, SliceLimits

BLOCK = 16
CPU = torch.device("cpu")
LIMITS = SliceLimits(64, 64 * 256, mlp_rows=32, key_tiles=KeyTiles((128, 512), 512))


class Wire:
    """Rank 0's end and another rank's."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.writer = PassWriter(self.ended.append)
        self.reader = PassReader(BLOCK, CPU)

    def carry(self, new: NewPass) -> NewPass:
        return self.reader.read(msgpack.unpackb(msgpack.packb(self.writer.write(new))))


def plain(new: NewPass) -> list[Any]:
    """All that a pass is made of."""
    inputs = [
        (list(i.token_ids), i.start, i.table.block_ids(0), i.table.num_blocks) for i in new.inputs
    ]
    return [inputs, new.granularity, new.limits]


def test_a_prefill_arrives_as_it_was_sent() -> None:
    inputs = [
        SequenceInput([5, 0, 127_999], 0, BlockTable([7, 3], BLOCK, CPU)),
        SequenceInput(list(range(40)), 32, BlockTable([1, 2, 9, 4, 5], BLOCK, CPU)),
    ]
    for granularity in (Granularity("tile"), Granularity("chunk", 96)):
        sent = NewPass(inputs, granularity, LIMITS)
        assert plain(Wire().carry(sent)) == plain(sent)


def test_a_table_is_told_once_and_then_what_was_added() -> None:
    wire, table = Wire(), BlockTable(range(100, 120), BLOCK, CPU)
    prefill = wire.carry(NewPass([SequenceInput([1], 0, table)], Granularity("tile"), LIMITS))
    table.extend([7])
    step = NewPass([SequenceInput([2], 320, table)], None, LIMITS)
    written = wire.writer.write(step)
    _, limits, [[_, _, _, added]] = written
    assert limits is None and len(added) == 4  # one block id; the limits are known
    read = wire.reader.read(written)
    assert read.inputs[0].table is prefill.inputs[0].table
    assert read.granularity is None and read.limits == LIMITS
    assert read.inputs[0].table.block_ids(0) == [*range(100, 120), 7]
    assert read.inputs[0].table.slot(320) == table.slot(320)


def test_a_table_that_nobody_has_any_more_is_told() -> None:
    wire, kept = Wire(), BlockTable([1], BLOCK, CPU)
    gone = BlockTable([2], BLOCK, CPU)
    wire.carry(NewPass([SequenceInput([1], 0, t) for t in (kept, gone)], None, LIMITS))
    del gone
    gc.collect()
    assert wire.ended == [1]
    wire.reader.forget_table(1)
    again = BlockTable([3], BLOCK, CPU)
    read = wire.carry(NewPass([SequenceInput([1], 0, again)], None, LIMITS))
    assert read.inputs[0].table.block_ids(0) == [3]
