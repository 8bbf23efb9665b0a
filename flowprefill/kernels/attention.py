"""Causal attention over the paged KV cache, for prefill and decode. Reference: ops/attention.py.

One kernel: a program takes some query rows of one KV head (each a token and one of the heads that
share the KV head) over the keys of one split. Splits and key tiles have fixed absolute edges, and a
row's partial results are put together over its own splits in a fixed order, so its bits depend on
nothing beside it. The running maximum is a whole number: what rescales a sum is a power of two, and
exact, so neither the number of splits nor fused multiply-adds round it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_HEAD_DIM = 256
COMBINE_WARPS = 2
SPLIT_BLOCK = 16
"""Splits whose partial results are read at a time."""


@dataclass(frozen=True)
class Tiling:
    """How the work is cut. A constant of head_dim, dtype and purpose: it decides the bits."""

    rows: int
    """Query rows (tokens x heads of a KV head) of a program."""
    keys: int
    """Keys of a tile."""
    split: int
    """Keys of a split: whole tiles."""
    num_warps: int
    num_stages: int


@triton.jit
def _attend(
    q,
    out,
    maximum,
    total,
    k_ptr,
    v_ptr,
    ids_ptr,
    positions,
    start,
    end,
    num_keys,
    ROW_STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_POW2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over keys start..end. Not MASKED: all rows see them all."""
    dims = tl.arange(0, HEAD_DIM_POW2)[None, :]
    for tile in range(start, end, BLOCK_N):
        keys = tile + tl.arange(0, BLOCK_N)
        if MASKED:
            written = keys < num_keys
            blocks = tl.load(ids_ptr + keys // BLOCK_SIZE, mask=written, other=0)
        else:
            blocks = tl.load(ids_ptr + keys // BLOCK_SIZE)
        slots = blocks * BLOCK_SIZE + keys % BLOCK_SIZE
        at = slots[:, None] * ROW_STRIDE + dims
        if MASKED:  # what lies behind the last key may be NaN
            mask = written[:, None] & (dims < HEAD_DIM)
            k = tl.load(k_ptr + at, mask=mask, other=0.0)
            v = tl.load(v_ptr + at, mask=mask, other=0.0)
        elif HEAD_DIM_POW2 > HEAD_DIM:
            k = tl.load(k_ptr + at, mask=dims < HEAD_DIM, other=0.0)
            v = tl.load(v_ptr + at, mask=dims < HEAD_DIM, other=0.0)
        else:
            k = tl.load(k_ptr + at)
            v = tl.load(v_ptr + at)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where(keys[None, :] <= positions[:, None], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.ceil(tl.max(scores, axis=1)))
        base = new_maximum
        if MASKED:  # a row that has seen no key yet
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        probs = tl.exp2(scores - base[:, None])
        decay = tl.exp2(maximum - base)
        total = total * decay + tl.sum(probs, axis=1)
        out = tl.dot(probs.to(v.dtype), v, out * decay[:, None], input_precision="ieee")
        maximum = new_maximum
    return out, maximum, total


@triton.jit(do_not_specialize=["sequences_ptr", "num_splits"])
def attention_kernel(
    q_ptr,
    out_ptr,
    k_ptr,
    v_ptr,
    sequences_ptr,
    partial_ptr,
    sums_ptr,
    num_splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_POW2: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Grid: (tiles of rows, KV heads x splits, sequences). Not IS_SPLIT: writes out_ptr itself."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    kv_head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(1) // KV_HEADS
    sequence = sequences_ptr + tl.program_id(2) * 4
    ids_ptr = tl.load(sequence).to(tl.pointer_type(tl.int64))
    first = tl.load(sequence + 1).to(tl.int32)
    first_token = tl.load(sequence + 2).to(tl.int32)
    num_rows = (tl.load(sequence + 3).to(tl.int32) - first_token) * GROUP
    first_row = tl.program_id(0) * BLOCK_M
    if first_row >= num_rows:
        return
    num_keys = first + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // GROUP + 1
    start = split * SPLIT
    if start >= num_keys:
        return
    end = tl.minimum(start + SPLIT, num_keys)
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    positions = first + rows // GROUP
    # [tokens, heads] of q, flat
    flat = (first_token + rows // GROUP) * HEADS + kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, HEAD_DIM_POW2)[None, :]
    mask = inside[:, None] & (dims < HEAD_DIM)
    q = tl.load(q_ptr + flat.to(tl.int64)[:, None] * HEAD_DIM + dims, mask=mask, other=0.0)
    out = tl.zeros([BLOCK_M, HEAD_DIM_POW2], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    seen_by_all = tl.minimum(first + first_row // GROUP + 1, end)
    # whole tiles that end before the first row's own position
    middle = start + tl.maximum(seen_by_all - start, 0) // BLOCK_N * BLOCK_N
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    out, maximum, total = _attend(
        q, out, maximum, total, k_ptr, v_ptr, ids_ptr, positions, start, middle, num_keys,
        KV_HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM_POW2, BLOCK_SIZE, BLOCK_N, False,
    )  # fmt: skip
    out, maximum, total = _attend(
        q, out, maximum, total, k_ptr, v_ptr, ids_ptr, positions, middle, end, num_keys,
        KV_HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM_POW2, BLOCK_SIZE, BLOCK_N, True,
    )  # fmt: skip
    if IS_SPLIT:
        part = flat.to(tl.int64) * num_splits + split
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dims, out, mask=mask)
        tl.store(sums_ptr + part * 2, maximum, mask=inside)
        tl.store(sums_ptr + part * 2 + 1, total, mask=inside)
    else:
        result = (out / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + flat.to(tl.int64)[:, None] * HEAD_DIM + dims, result, mask=mask)


@triton.jit(do_not_specialize=["sequences_ptr", "num_splits"])
def combine_kernel(
    partial_ptr,
    sums_ptr,
    sequences_ptr,
    out_ptr,
    num_splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_POW2: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_BLOCK: tl.constexpr,
):
    """One token's head from its splits. Grid: (max_rows, heads, sequences)."""
    sequence = sequences_ptr + tl.program_id(2) * 4
    token = tl.program_id(0) + tl.load(sequence + 2)
    if token >= tl.load(sequence + 3):
        return
    # of the row's own keys: what others have is not read
    num_own = (tl.load(sequence + 1).to(tl.int32) + tl.program_id(0)) // SPLIT + 1
    flat = token * HEADS + tl.program_id(1)
    block = tl.arange(0, SPLIT_BLOCK)
    dims = tl.arange(0, HEAD_DIM_POW2)
    maximum = float("-inf")
    for first in range(0, num_own, SPLIT_BLOCK):
        splits = first + block
        at = sums_ptr + (flat * num_splits + splits) * 2
        maxima = tl.load(at, mask=splits < num_own, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(maxima, axis=0))
    out = tl.zeros([HEAD_DIM_POW2], tl.float32)
    total = 0.0
    for first in range(0, num_own, SPLIT_BLOCK):
        splits = first + block
        part = flat * num_splits + splits
        mask = splits < num_own
        maxima = tl.load(sums_ptr + part * 2, mask=mask, other=float("-inf"))
        totals = tl.load(sums_ptr + part * 2 + 1, mask=mask, other=0.0)
        at = partial_ptr + part[:, None] * HEAD_DIM + dims[None, :]
        outs = tl.load(at, mask=mask[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        weights = tl.exp2(maxima - maximum)
        total += tl.sum(totals * weights, axis=0)
        out += tl.sum(outs * weights[:, None], axis=0)
    result = (out / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


def prefill_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Of query rows in bulk. Splits are long: few rows have more than one."""
    rows = 128 if _row_bytes(head_dim, dtype) <= 256 else 64
    return Tiling(rows, _keys(head_dim, dtype), split=8192, num_warps=8, num_stages=2)


def decode_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Of one token of each sequence. Splits are short, so that a lone sequence fills the device."""
    return Tiling(16, _keys(head_dim, dtype), split=512, num_warps=4, num_stages=2)


def _keys(head_dim: int, dtype: torch.dtype) -> int:
    """So that no registers are spilled, and shared memory suffices (compile_report.py)."""
    return max(16, min(64, 64 * 256 // _row_bytes(head_dim, dtype)))


def _row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    return _padded(head_dim) * dtype.itemsize


def _padded(head_dim: int) -> int:
    """Dimensions of a tile: a power of two, and no less than the inner size of a dot."""
    return max(16, 1 << (head_dim - 1).bit_length())


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    sequences: Tensor,
    max_rows: int,
    max_keys: int,
    tiling: Tiling,
) -> None:
    """Attention of consecutive query rows of each of several sequences, in place.

    q:         [num_tokens, num_heads, head_dim] bf16 or fp32, already times query_scale (of ops/),
               packed by sequence; overwritten by the result
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of one layer, same dtype
    sequences: [num_seqs, 4] int64: address of the block ids (int64), position of the first query
               row, and from which to which row of q; a row attends to positions up to its own
    max_rows:  query rows of a sequence at most
    max_keys:  position of the last query row of any sequence, plus one
    FlashAttention-2, https://arxiv.org/abs/2307.08691, Algorithm 1; the splits of FlashDecoding.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    assert all(t.is_contiguous() for t in (q, k_cache, v_cache, sequences))
    assert head_dim <= MAX_HEAD_DIM and tiling.split % tiling.keys == 0
    num_seqs, num_splits = len(sequences), triton.cdiv(max_keys, tiling.split)
    is_split = num_splits > 1
    partial = sums = None
    if is_split:
        shape = num_tokens, num_heads, num_splits
        partial = q.new_empty((*shape, head_dim), dtype=torch.float32)
        sums = q.new_empty((*shape, 2), dtype=torch.float32)
    head_dim_pow2 = _padded(head_dim)
    num_rows = max_rows * (num_heads // num_kv_heads)
    attention_kernel[triton.cdiv(num_rows, tiling.rows), num_kv_heads * num_splits, num_seqs](
        q, q, k_cache, v_cache, sequences, partial, sums, num_splits,
        num_heads, num_kv_heads, head_dim, head_dim_pow2, block_size,
        tiling.rows, tiling.keys, tiling.split, is_split,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if is_split:
        combine_kernel[max_rows, num_heads, num_seqs](
            partial, sums, sequences, q, num_splits,
            num_heads, head_dim, head_dim_pow2, tiling.split, SPLIT_BLOCK,
            num_warps=COMBINE_WARPS,
        )  # fmt: skip
