"""Paged attention against a softmax over all keys in fp64, and the bits of each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_kernels import (  # first: it skips where triton is not installed
    DEVICE,
    quick_interpreter,
    row_by_row,
)

# isort: split

from flowprefill.kernels.attention import Tiling, decode_tiling, paged_attention, prefill_tiling
from tests.unit.ops.test_attention import TOLERANCE, Case

__all__ = ["quick_interpreter", "row_by_row"]

BULK = Tiling(rows=32, keys=16, split=8192, num_warps=4, num_stages=2)
SPLIT = Tiling(rows=16, keys=16, split=32, num_warps=4, num_stages=2)
TILINGS = {"bulk": BULK, "split": SPLIT}
GROUPS = [(2, 2, 16), (6, 2, 16), (5, 1, 32)]
"""(heads, kv_heads, head_dim): groups of 1, 3, 5."""

pytestmark = pytest.mark.usefixtures("row_by_row", "quick_interpreter")


@pytest.fixture(params=TILINGS)
def tiling(request: pytest.FixtureRequest) -> Tiling:
    return TILINGS[request.param]


def make_case(lengths: Sequence[int], shape: tuple[int, int, int], garbage: float = 1e30) -> Case:
    return Case(lengths, *shape, torch.float32, garbage=garbage, block_size=8)


def attend(
    case: Case,
    rows: Sequence[Tensor],
    first: Sequence[int],
    tiling: Tiling,
    sequences: Sequence[int] | None = None,
    max_keys: int | None = None,
) -> list[Tensor]:
    """Attention of different numbers of rows of some sequences, [rows, heads, head_dim] each."""
    chosen = range(len(rows)) if sequences is None else sequences
    ids = [case.tables[i].ids.to(DEVICE) for i in chosen]
    ends = torch.tensor([len(r) for r in rows]).cumsum(0).tolist()
    starts = [end - len(r) for end, r in zip(ends, rows, strict=True)]
    addresses = [tensor.data_ptr() for tensor in ids]
    described = torch.tensor(list(zip(addresses, first, starts, ends, strict=True)), device=DEVICE)
    q = torch.cat(list(rows)).to(DEVICE)
    k, v = case.cache.k[0].to(DEVICE), case.cache.v[0].to(DEVICE)
    needed = max(f + len(r) for f, r in zip(first, rows, strict=True))
    most = max(len(r) for r in rows)
    paged_attention(q, k, v, described, most, max_keys or needed, tiling)
    return [part.to("cpu") for part in q.split([len(r) for r in rows])]


def assert_near_reference(
    case: Case, num_rows: Sequence[int], first: Sequence[int], tiling: Tiling
) -> None:
    q = case.queries(max(num_rows))
    rows = [q[i, :n] for i, n in enumerate(num_rows)]
    outs = attend(case, rows, first, tiling)
    for i, (out, position) in enumerate(zip(outs, first, strict=True)):
        expected = case.reference(rows[i], position, i)
        torch.testing.assert_close(out.double(), expected, **TOLERANCE[case.dtype])


@pytest.mark.parametrize("context", [1, 2, 15, 16, 17, 31, 32, 33, 70])
def test_a_lone_row_equals_the_reference_at_tile_and_split_edges(
    context: int, tiling: Tiling
) -> None:
    assert_near_reference(make_case([context], (6, 2, 16)), [1], [context - 1], tiling)


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize(("first", "rows"), [(0, 16), (0, 23), (30, 11)])
def test_rows_across_edges_equal_the_reference(
    first: int, rows: int, shape: tuple[int, int, int], tiling: Tiling
) -> None:
    assert_near_reference(make_case([first + rows], shape), [rows], [first], tiling)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("make_tiling", [prefill_tiling, decode_tiling])
def test_tilings_of_the_models_equal_the_reference(
    make_tiling: Callable[[int, torch.dtype], Tiling], head_dim: int
) -> None:
    tiling = make_tiling(head_dim, torch.float32)
    case = make_case([70], (4, 2, head_dim))
    assert_near_reference(case, [20], [50], replace(tiling, split=64))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("make_tiling", [prefill_tiling, decode_tiling])
def test_bf16_equals_the_reference(
    make_tiling: Callable[[int, torch.dtype], Tiling], head_dim: int
) -> None:
    case = Case([1200], 8, 2, head_dim, torch.bfloat16)
    assert_near_reference(case, [300], [900], make_tiling(head_dim, torch.bfloat16))


def test_sequences_of_different_contexts_and_rows_equal_the_reference(tiling: Tiling) -> None:
    first, rows = [70, 33, 0], [1, 5, 12]
    case = make_case([f + n for f, n in zip(first, rows, strict=True)], (6, 2, 16))
    assert_near_reference(case, rows, first, tiling)


@pytest.mark.parametrize("garbage", [math.inf, math.nan])
def test_what_unused_slots_hold_does_not_change_a_bit(garbage: float, tiling: Tiling) -> None:
    outs = []
    for filling in (garbage, 0.5):
        case = make_case([43, 20], (4, 2, 16), filling)
        outs.append(torch.cat(attend(case, [*case.queries(4)], [39, 16], tiling)))
    assert torch.equal(*outs)


@pytest.mark.parametrize("shape", GROUPS)
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(
    shape: tuple[int, int, int], tiling: Tiling
) -> None:
    first, num_rows = 25, 14
    case = make_case([first + num_rows], shape)
    q = case.queries(num_rows)[0]
    (together,) = attend(case, [q], [first], tiling)
    for sizes in ([1, 13], [9, 5]):
        starts = [0, sizes[0]]
        parts = [
            attend(case, [part], [first + start], tiling)[0]
            for start, part in zip(starts, q.split(sizes), strict=True)
        ]
        assert torch.equal(torch.cat(parts), together), f"{sizes} rows at a time"


def test_bits_of_a_sequence_do_not_depend_on_the_sequences_beside_it(tiling: Tiling) -> None:
    first = [90, 40, 13]
    case = make_case([f + 1 for f in first], (6, 2, 16))
    q = case.queries(1)
    together = attend(case, [*q], first, tiling)
    for i in range(len(first)):
        (alone,) = attend(case, [q[i]], [first[i]], tiling, [i])
        assert torch.equal(alone, together[i]), f"sequence {i}"


def test_a_row_of_one_split_has_the_same_bits_where_there_are_many() -> None:
    case = make_case([30], (6, 2, 16))
    q = case.queries(4)[0]
    (alone,) = attend(case, [q], [26], SPLIT)
    (beside,) = attend(case, [q], [26], SPLIT, max_keys=20 * SPLIT.split)
    assert torch.equal(alone, beside)


def test_tiles_are_whole_parts_of_a_split_for_every_model() -> None:
    for head_dim in (16, 64, 80, 96, 128, 192, 256):
        for dtype in (torch.bfloat16, torch.float32):
            for tiling in (prefill_tiling(head_dim, dtype), decode_tiling(head_dim, dtype)):
                assert tiling.split % tiling.keys == 0 and tiling.keys >= 16
