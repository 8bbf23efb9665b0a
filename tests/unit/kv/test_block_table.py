from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import MAX_KEY_TILE, KVCache

CPU = torch.device("cpu")

block_ids = st.lists(st.integers(0, 1000), min_size=1, max_size=40, unique=True)


@given(block_ids, st.integers(1, 64), st.data())
def test_slots_are_block_id_times_size_plus_offset(
    ids: list[int], block_size: int, data: st.DataObject
) -> None:
    num_tokens = len(ids) * block_size
    start = data.draw(st.integers(0, num_tokens))
    end = data.draw(st.integers(start, num_tokens))
    slots = BlockTable(ids, block_size, CPU).slots(start, end)
    assert slots.dtype == torch.int64
    expected = [ids[p // block_size] * block_size + p % block_size for p in range(start, end)]
    assert slots.tolist() == expected


@given(block_ids, st.integers(1, 64))
def test_no_two_tokens_share_a_slot(ids: list[int], block_size: int) -> None:
    slots = BlockTable(ids, block_size, CPU).slots(0, len(ids) * block_size)
    assert len(set(slots.tolist())) == len(slots)


@given(block_ids, st.integers(1, 2000))
def test_a_key_tile_that_begins_in_the_last_block_finds_ids(
    ids: list[int], block_size: int
) -> None:
    table = BlockTable(ids, block_size, CPU)
    last_token = len(ids) * block_size - 1
    blocks_read = -(-(last_token + MAX_KEY_TILE) // block_size)
    assert len(table.ids) >= blocks_read
    assert table.ids[: len(ids)].tolist() == ids


@pytest.mark.parametrize(
    ("ids", "is_contiguous"),
    [([3], True), ([3, 4, 5], True), ([3, 5], False), ([4, 3], False), ([0, 1, 3], False)],
)
def test_neighbouring_blocks_in_order_are_contiguous(ids: list[int], is_contiguous: bool) -> None:
    table = BlockTable(ids, 16, CPU)
    assert table.is_contiguous is is_contiguous
    assert table.first == ids[0]


@given(st.lists(block_ids, min_size=1, max_size=8), st.integers(1, 600))
def test_a_table_that_grew_equals_one_made_at_once(
    pieces: list[list[int]], block_size: int
) -> None:
    grown = BlockTable([], block_size, CPU)
    for piece in pieces:
        grown.extend(piece)
    ids = [block_id for piece in pieces for block_id in piece]
    made = BlockTable(ids, block_size, CPU)
    assert grown.ids[: len(made.ids)].tolist() == made.ids.tolist()
    assert grown.ids[len(ids) :].count_nonzero() == 0
    assert (grown.num_blocks, grown.first) == (made.num_blocks, made.first) == (len(ids), ids[0])
    assert grown.is_contiguous is made.is_contiguous


@pytest.mark.parametrize(
    ("more", "is_contiguous"),
    [([5, 6], True), ([], True), ([6], False), ([4], False), ([5, 7], False), ([3], False)],
)
def test_growing_keeps_a_table_contiguous_only_with_the_next_blocks(
    more: list[int], is_contiguous: bool
) -> None:
    table = BlockTable([3, 4], 16, CPU)
    table.extend(more)
    assert table.is_contiguous is is_contiguous
    table.extend([3 + table.num_blocks])
    assert table.is_contiguous is is_contiguous


def test_growing_block_by_block_seldom_copies_the_ids() -> None:
    table, storages = BlockTable([], 16, CPU), set()
    for block_id in range(1000):
        table.extend([block_id])
        storages.add(len(table.ids))
    assert len(storages) <= 10


def test_a_token_without_a_block_is_caught() -> None:
    table = BlockTable([3, 4], 16, CPU)
    table.slots(16, 32)
    with pytest.raises(AssertionError, match="no block for token 32"):
        table.slots(16, 33)


class TestCache:
    """Rows written through a table's slots."""

    @staticmethod
    def make_cache(dtype: torch.dtype = torch.float32, block_size: int = 4) -> KVCache:
        return KVCache(
            10, block_size, num_layers=2, num_kv_heads=2, head_dim=8, dtype=dtype, device=CPU
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_rows_land_in_their_slots_and_nowhere_else(self, dtype: torch.dtype) -> None:
        cache, table = self.make_cache(dtype), BlockTable([7, 2], 4, CPU)
        k, v = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
        cache.write(1, table.slots(3, 6), k, v)  # the last token of block 7, two of block 2
        expected_k, expected_v = torch.zeros_like(cache.k), torch.zeros_like(cache.v)
        for row, (block, offset) in enumerate([(7, 3), (2, 0), (2, 1)]):
            expected_k[1, block, offset] = k[row].to(dtype)
            expected_v[1, block, offset] = v[row].to(dtype)
        assert torch.equal(cache.k, expected_k) and torch.equal(cache.v, expected_v)

    @pytest.mark.parametrize("block_size", [1, 4, 48, 2048])
    def test_a_key_tile_behind_the_last_block_stays_inside_the_cache(self, block_size: int) -> None:
        cache = self.make_cache(block_size=block_size)
        assert cache.num_blocks == 10
        last_token = 10 * block_size - 1
        assert cache.k.shape[1] * block_size >= last_token + MAX_KEY_TILE
        assert cache.k.shape == cache.v.shape == (2, cache.k.shape[1], block_size, 2, 8)

    def test_unwritten_slots_are_finite(self) -> None:
        cache = self.make_cache()
        assert bool(cache.k.isfinite().all()) and bool(cache.v.isfinite().all())
