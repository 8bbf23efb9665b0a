"""Block table of one request: block ids as a tensor, and positions -> slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowprefill.kv.cache import MAX_KEY_TILE


class BlockTable:
    """Where the tokens of one request live in the KV cache."""

    def __init__(self, block_ids: Sequence[int], block_size: int, device: torch.device) -> None:
        """block_ids: the request's blocks in token order."""
        self.block_size = block_size
        # A key tile may reach past the last block; block 0 fills the rest, its keys are masked.
        padding = [0] * (MAX_KEY_TILE // block_size + 1)
        self.ids = torch.tensor([*block_ids, *padding], dtype=torch.int64, device=device)
        self.first = block_ids[0] if block_ids else 0
        self.is_contiguous = all(b == self.first + i for i, b in enumerate(block_ids))

    def slots(self, start: int, end: int) -> Tensor:
        """Slots of token positions start..end: [end - start] int64."""
        positions = torch.arange(start, end, device=self.ids.device)
        blocks = self.ids[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size
