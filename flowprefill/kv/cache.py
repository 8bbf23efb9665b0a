"""The K and V tensors of all blocks, and their one shape. Knows no requests and no scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_KEY_TILE = 1024
"""Tokens of the widest key tile (ops/attention.py)."""


class KVCache:
    """k, v: [num_layers, num_blocks + padding, block_size, num_kv_heads, head_dim] bf16 or fp32.

    The padding blocks at the end are never handed out: a key tile may read past the end of the last
    block, and what it reads is masked, so it only has to be finite.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        padding = -(-MAX_KEY_TILE // block_size)
        shape = (num_layers, num_blocks + padding, block_size, num_kv_heads, head_dim)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows of K and V.

        slots: [num_rows] int64, block_id * block_size + offset
        k, v:  [num_rows, num_kv_heads, head_dim]
        """
        for cache, rows in ((self.k, k), (self.v, v)):
            cache[layer].flatten(0, 1).index_copy_(0, slots, rows.to(cache.dtype))
