"""KVCache: what was stored at a slot is read there, in both layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flowprefill.kv.cache import GROUP, KVCache

NUM_BLOCKS, NUM_LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 3, 32


def make_cache(dtype: torch.dtype, block_size: int, is_packed: bool) -> KVCache:
    return KVCache(
        NUM_BLOCKS,
        block_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype=dtype,
        device=torch.device("cpu"),
        is_packed=is_packed,
    )


def store(cache: KVCache, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """One value at a time, where the layout says that it lies."""
    if not cache.is_packed:
        cache.write(layer, slots, k, v)
        return
    pair = 4 // cache.k.dtype.itemsize
    for row, slot in enumerate(slots.tolist()):
        group, token = divmod(slot, GROUP)
        for head in range(KV_HEADS):
            for d in range(HEAD_DIM):
                cache.k[layer, group, head, d // pair, token, d % pair] = k[row, head, d]
                panel = cache.v[layer, group, head, d // GROUP]
                panel[token // pair, d % GROUP, token % pair] = v[row, head, d]


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_packed", [False, True], ids=["rows", "packed"])
def test_what_was_stored_is_read(is_packed: bool, dtype: torch.dtype, block_size: int) -> None:
    cache = make_cache(dtype, block_size, is_packed)
    num_slots = NUM_BLOCKS * block_size
    slots = torch.randperm(num_slots)[: num_slots // 2]
    k, v = torch.randn(2, NUM_LAYERS, len(slots), KV_HEADS, HEAD_DIM).to(dtype)
    for layer in range(NUM_LAYERS):
        store(cache, layer, slots, k[layer], v[layer])
    assert torch.equal(cache.read(slots), torch.stack([k, v]))
    order = torch.randperm(len(slots))
    assert torch.equal(cache.read(slots[order]), torch.stack([k, v])[:, :, order])
    others = torch.tensor(sorted(set(range(num_slots)) - set(slots.tolist())))
    assert not cache.read(others).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_layouts_take_the_same_memory_but_for_padding(dtype: torch.dtype) -> None:
    rows, packed = (make_cache(dtype, 48, is_packed) for is_packed in (False, True))
    assert packed.k.nbytes == packed.v.nbytes == rows.k[:, :NUM_BLOCKS].nbytes


def test_the_packed_layout_is_written_by_the_kernels_alone() -> None:
    cache = make_cache(torch.float32, 16, is_packed=True)
    rows = torch.zeros(1, KV_HEADS, HEAD_DIM)
    with pytest.raises(AssertionError):
        cache.write(0, torch.tensor([0]), rows, rows)
