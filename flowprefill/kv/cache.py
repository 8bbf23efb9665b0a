"""The K and V tensors of all blocks, in one of two layouts. Knows no requests and no scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

from flowprefill.errors import ConfigError
from flowprefill.huge_pages import Arena, aligned

MAX_KEY_TILE = 1024
"""Tokens of the widest key tile (ops/attention.py)."""

GROUP = 16
"""Tokens, or dimensions, side by side in a vector of the packed layout."""

_MIN_KV_TOKENS = 256
"""KV cache that a useful engine has at least, unless max_model_len is smaller."""


def blocks_in(
    memory: int, setting: str, block_bytes: int, block_size: int, max_model_len: int
) -> int:
    """KV blocks that so many bytes hold. Raises ConfigError if they are too few.

    setting: of model.json, where the bytes come from; block_size: tokens of a block
    """
    smallest = -(-min(max_model_len, _MIN_KV_TOKENS) // block_size) * block_bytes
    if memory < smallest:
        raise ConfigError(f"model.json: {setting}: the KV cache needs at least {smallest} bytes")
    return memory // block_bytes


class KVCache:
    """K and V of num_blocks blocks in every layer, bf16 or fp32.

    rows:   k, v [num_layers, num_blocks + padding, block_size, num_kv_heads, head_dim]. The padding
            blocks at the end are never handed out: a key tile may read past the end of the last
            block, and what it reads is masked, so it only has to be finite.
    packed: for the native kernels (native/src/attention.h); block_size and head_dim are multiples
            of 16.
            P = values in 32 bits, 2 in bf16 and 1 in fp32
            k [num_layers, groups of 16 tokens, num_kv_heads, head_dim / P, 16 tokens, P]
            v [num_layers, groups of 16 tokens, num_kv_heads, head_dim / 16, 16 / P, 16 dims, P]
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
        is_packed: bool = False,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.is_packed = is_packed
        if is_packed:
            pair = 4 // dtype.itemsize
            groups = (num_layers, num_blocks * block_size // GROUP, num_kv_heads)
            k_shape = (*groups, head_dim // pair, GROUP, pair)
            v_shape = (*groups, head_dim // GROUP, GROUP // pair, GROUP, pair)
            num_bytes = torch.Size(k_shape).numel() * dtype.itemsize
            arena = Arena(2 * aligned(num_bytes))
            self.k, self.v = arena.take(k_shape, dtype), arena.take(v_shape, dtype)
        else:
            padding = -(-MAX_KEY_TILE // block_size)
            shape = (num_layers, num_blocks + padding, block_size, num_kv_heads, head_dim)
            self.k = torch.zeros(shape, dtype=dtype, device=device)
            self.v = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store rows of K and V; not for the packed layout, which the kernels write.

        slots: [num_rows] int64, block_id * block_size + offset
        k, v:  [num_rows, num_kv_heads, head_dim]
        """
        assert not self.is_packed
        for cache, rows in ((self.k, k), (self.v, v)):
            cache[layer].flatten(0, 1).index_copy_(0, slots, rows.to(cache.dtype))

    def read(self, slots: Tensor) -> Tensor:
        """K and V of some tokens: [2, num_layers, num_rows, num_kv_heads, head_dim]."""
        if not self.is_packed:
            return torch.stack([t.flatten(1, 2)[:, slots] for t in (self.k, self.v)])
        group, token, pair = slots // GROUP, slots % GROUP, self.v.shape[-1]
        # the indexed dimensions first, then layers, heads and those of the head
        k = self.k.permute(1, 4, 0, 2, 3, 5)[group, token].flatten(3)
        v = self.v.permute(1, 4, 6, 0, 2, 3, 5)[group, token // pair, token % pair].flatten(3)
        return torch.stack([k, v]).transpose(1, 2)
