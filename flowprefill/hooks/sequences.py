"""Sequences: the cache object of each sequence, held as long as its KV blocks are its own.

The block pool counts blocks, and each stands for the memory of block_size tokens in a cache object.
A sequence is known by its block table: who starts again has another one. A cache is given up when
its table is (the request has ended), or when somebody else is given one of its blocks (the request
was evicted), so the caches there are never hold more than the pool's memory.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flowprefill.kv.block_table import BlockTable


@dataclass(eq=False)
class Sequence:
    """What a sequence has computed."""

    cache: Any = None
    """The model's; None = nothing is in it."""
    num_tokens: int = 0
    """In the cache."""
    logits: Tensor | None = None
    """[vocab] after the last of them."""
    pending: Any = None
    """The decode pass that has begun to add a token: it goes on, whoever asks next."""
    blocks: set[int] = field(default_factory=set)

    def drop(self) -> None:
        """Its blocks are somebody else's."""
        self.cache = self.logits = self.pending = None
        self.num_tokens = 0


class Sequences:
    """All of one engine's. One thread uses it."""

    def __init__(self) -> None:
        self._by_table: weakref.WeakKeyDictionary[BlockTable, Sequence] = (
            weakref.WeakKeyDictionary()
        )
        self._owners: dict[int, weakref.ref[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._by_table)

    def of(self, table: BlockTable) -> Sequence:
        """The sequence of this table, which owns the table's blocks from now on."""
        found = self._by_table.get(table)
        if found is None:
            found = self._by_table[table] = Sequence()
        if table.num_blocks == len(found.blocks):
            return found
        for block in table.block_ids(len(found.blocks)):
            reference = self._owners.get(block)
            owner = reference() if reference else None
            if owner is not None and owner is not found:
                self._take_all(owner)
            self._owners[block] = weakref.ref(found)
            found.blocks.add(block)
        return found

    def _take_all(self, owner: Sequence) -> None:
        owner.drop()
        for block in owner.blocks:
            del self._owners[block]
        owner.blocks.clear()
