"""Block table of one request: block ids as a tensor, and positions -> slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowprefill.kv.cache import MAX_KEY_TILE
from flowprefill.kv.host_copies import to_device


class BlockTable:
    """Where the tokens of one request live in the KV cache.

    ids:           [>= num_blocks + a key tile] int64: the blocks in token order, then zeros. A key
                   tile may reach past the last block; its keys there are masked.
    first, is_contiguous: block `i` of the request is `first + i`
    """

    def __init__(self, block_ids: Sequence[int], block_size: int, device: torch.device) -> None:
        """block_ids: the request's blocks in token order."""
        self.block_size = block_size
        self.num_blocks = 0
        self._block_ids: list[int] = []
        self.first = 0
        self.is_contiguous = True
        self._padding = MAX_KEY_TILE // block_size + 1
        capacity = len(block_ids) + self._padding
        self.ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.extend(block_ids)

    def extend(self, block_ids: Sequence[int]) -> None:
        """Append blocks, behind those there are. Constant time per block in the long run."""
        if self.num_blocks == 0 and block_ids:
            self.first = block_ids[0]
        start, end = self.num_blocks, self.num_blocks + len(block_ids)
        if end + self._padding > len(self.ids):
            longer = self.ids.new_zeros(2 * end + self._padding)
            longer[:start] = self.ids[:start]
            self.ids = longer
        self._block_ids += block_ids
        self.ids[start:end] = to_device(block_ids, self.ids.device)
        self.is_contiguous &= all(b == self.first + i for i, b in enumerate(block_ids, start))
        self.num_blocks = end

    def block_ids(self, start: int) -> list[int]:
        """The blocks from the start-th on, known without asking the device."""
        return self._block_ids[start:]

    def slot(self, position: int) -> int:
        """Slot of one token position."""
        assert position < self.num_blocks * self.block_size, f"no block for token {position}"
        block = self._block_ids[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def slots(self, start: int, end: int) -> Tensor:
        """Slots of token positions start..end: [end - start] int64."""
        # Beyond its blocks a request would write into block 0, which is somebody else's.
        assert end <= self.num_blocks * self.block_size, f"no block for token {end - 1}"
        positions = torch.arange(start, end, device=self.ids.device)
        blocks = self.ids[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
