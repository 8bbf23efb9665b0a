"""Paged attention against a softmax over all keys in fp64, and the bits of each row."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache
from flowprefill.ops.attention import key_tiles, paged_attention, query_scale

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {
    torch.float32: {"atol": 2e-6, "rtol": 2e-6},
    torch.bfloat16: {"atol": 6e-3, "rtol": 1e-2},
}
CONTEXTS = (1, 2, 16, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049, 2100)
GROUPS = [(2, 2, 16), (2, 1, 64), (6, 2, 16), (9, 3, 64), (4, 1, 16), (8, 2, 64)]
"""(heads, kv_heads, head_dim): groups of 1, 2, 3, 3, 4, 4."""


class Case:
    """Sequences of random keys in one cache whose unused part holds `garbage`."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        *,
        block_size: int = 16,
        scattered: bool = True,
        garbage: float = 1e30,
        seed: int = 0,
    ) -> None:
        self.heads, self.head_dim, self.dtype = heads, head_dim, dtype
        counts = [-(-n // block_size) for n in lengths]
        blocks = list(range(sum(counts)))
        if scattered:
            random.Random(seed).shuffle(blocks)
        self.cache = KVCache(
            len(blocks),
            block_size,
            num_layers=1,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=CPU,
        )
        self.cache.k.fill_(garbage)
        self.cache.v.fill_(-garbage)
        self.tables, self.keys, self.values = [], [], []
        for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
            # a sequence's contents depend on its index alone, not on the others
            generator = torch.Generator().manual_seed(seed + index)
            self.tables.append(BlockTable(blocks[:count], block_size, CPU))
            del blocks[:count]
            k, v = torch.randn(2, length, kv_heads, head_dim, generator=generator).to(dtype)
            self.cache.write(0, self.tables[-1].slots(0, length), k, v)
            self.keys.append(k)
            self.values.append(v)

    def queries(self, rows: int, seed: int = 100) -> Tensor:
        """[seqs, rows, heads, head_dim], times query_scale."""
        shape = (rows, self.heads, self.head_dim)
        each = [
            torch.randn(shape, generator=torch.Generator().manual_seed(seed + i))
            for i in range(len(self.tables))
        ]
        return (torch.stack(each) * query_scale(self.head_dim)).to(self.dtype)

    def run(
        self, q: Tensor, first: Sequence[int], sequences: Sequence[int] | None = None
    ) -> Tensor:
        chosen = range(len(self.tables)) if sequences is None else sequences
        tables = [self.tables[i] for i in chosen]
        return paged_attention(q, self.cache.k[0], self.cache.v[0], tables, first)

    def reference(self, q: Tensor, first: int, sequence: int) -> Tensor:
        """Softmax over all keys of one sequence, fp64. q: [rows, heads, head_dim]."""
        group = self.heads // self.keys[sequence].shape[1]
        k = self.keys[sequence].double().repeat_interleave(group, 1)
        v = self.values[sequence].double().repeat_interleave(group, 1)
        scores = torch.einsum("rhd,khd->hrk", q.double(), k) * math.log(2)
        rows, keys = torch.arange(q.shape[0]) + first, torch.arange(k.shape[0])
        scores.masked_fill_(keys > rows[:, None], -math.inf)
        return torch.einsum("hrk,khd->rhd", scores.softmax(-1), v)


def assert_near_reference(case: Case, rows: int, first: Sequence[int]) -> None:
    q = case.queries(rows)
    out = case.run(q, first)
    assert out.shape == q.shape and out.dtype == q.dtype
    for i, position in enumerate(first):
        expected = case.reference(q[i], position, i)
        torch.testing.assert_close(out[i].double(), expected, **TOLERANCE[case.dtype])


def test_key_tiles_cover_the_keys_and_keep_their_edges() -> None:
    longest = list(key_tiles(5000))
    for num_keys in range(1, 3000, 7):
        tiles = list(key_tiles(num_keys))
        assert tiles == longest[: len(tiles)]
        assert tiles[0][0] == 0 and tiles[-1][0] < num_keys <= tiles[-1][1]
        assert all(a[1] == b[0] for a, b in itertools.pairwise(tiles))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_lone_row_equals_the_reference_at_key_tile_edges(
    context: int, dtype: torch.dtype
) -> None:
    assert_near_reference(Case([context], 9, 3, 64, dtype), 1, [context - 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GROUPS)
def test_head_groups_and_sizes_equal_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    assert_near_reference(Case([170], *shape, dtype), 45, [125])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first", "rows"), [(0, 1), (0, 17), (0, 150), (100, 60), (500, 13), (1000, 50), (2040, 60)]
)
def test_rows_across_key_tile_edges_equal_the_reference(
    first: int, rows: int, dtype: torch.dtype
) -> None:
    assert_near_reference(Case([first + rows], 6, 2, 16, dtype), rows, [first])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7])
def test_sequences_of_different_length_in_one_call_equal_the_reference(
    rows: int, dtype: torch.dtype
) -> None:
    first = [2050, 1024, 1017, 512, 129, 128, 40, 0]
    assert_near_reference(Case([f + rows for f in first], 4, 2, 16, dtype), rows, first)


@pytest.mark.parametrize("block_size", [1, 8, 24, 48, 200, 2048])
def test_any_block_size_equals_the_reference(block_size: int) -> None:
    case = Case([1200, 300], 4, 2, 16, torch.float32, block_size=block_size)
    assert_near_reference(case, 5, [1195, 295])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [140, 1300])
def test_contiguous_and_scattered_blocks_give_the_same_bits(
    length: int, dtype: torch.dtype
) -> None:
    outs = []
    for scattered in (True, False):
        case = Case([length], 9, 3, 64, dtype, scattered=scattered)
        assert case.tables[0].is_contiguous is not scattered
        outs.append(case.run(case.queries(40), [length - 40]))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [0.0, -1e4, 1e30, math.inf, math.nan])
def test_what_unused_slots_hold_does_not_change_a_bit(garbage: float, dtype: torch.dtype) -> None:
    outs = []
    for filling in (garbage, 0.5):
        case = Case([133, 20], 4, 2, 16, dtype, garbage=filling)
        outs.append(case.run(case.queries(10), [123, 10]))
    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize(("first", "rows"), [(0, 37), (111, 37), (1010, 53)])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    first: int, rows: int, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    case = Case([first + rows], *shape, dtype)
    q = case.queries(rows)
    together = case.run(q, [first])
    for size in (1, 2, 5, 16, 33):
        parts = [
            case.run(q[:, r : r + size].contiguous(), [first + r]) for r in range(0, rows, size)
        ]
        assert torch.equal(torch.cat(parts, dim=1), together), f"{size} rows at a time"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GROUPS)
def test_bits_of_a_sequence_do_not_depend_on_the_sequences_beside_it(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    first = [1500, 700, 513, 130, 3]
    case = Case([f + 1 for f in first], *shape, dtype)
    q = case.queries(1)
    together = case.run(q, first)
    for chosen in ([0], [1], [2], [3], [4], [0, 4], [1, 2, 3], [0, 1, 3, 4]):
        alone = case.run(q[chosen], [first[i] for i in chosen], chosen)
        assert torch.equal(alone, together[chosen]), f"sequences {chosen}"
