"""From q, k, v to what attention reads: norm of the heads, rotation, K and V into the cache.

Reference: ops/rmsnorm.py, RotaryTable of ops/rope.py and KVCache.write, one after the other.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

HEAD_BLOCK = 8
"""Heads that a program has in registers at a time."""
NUM_WARPS = 4


@triton.jit
def _rotate(
    heads_at,
    norm_ptr,
    cos,
    sin,
    dims,
    swapped,
    mask,
    eps,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Some heads of one row, fp32 [heads, dims]. heads_at: where each head begins."""
    x = tl.load(heads_at + dims, mask=mask, other=0.0)
    y = tl.load(heads_at + swapped, mask=mask, other=0.0)
    wide, wide_swapped = x.to(tl.float32), y.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / HEAD_DIM + eps)[:, None]
        in_head = dims < HEAD_DIM
        weight = tl.load(norm_ptr + dims, mask=in_head, other=0.0)
        weight_swapped = tl.load(norm_ptr + swapped, mask=in_head, other=0.0)
        # rounded, as the reference's norm ends with the model's dtype
        wide = (wide * scale * weight).to(x.dtype).to(tl.float32)
        wide_swapped = (wide_swapped * scale * weight_swapped).to(x.dtype).to(tl.float32)
    return wide * cos + wide_swapped * sin


# a tile may begin at any row: for each alignment there would be another compilation
@triton.jit(do_not_specialize=["positions_ptr", "slots_ptr"])
def rope_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    q_scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_POW2: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """One row, all its heads."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, HEAD_DIM_POW2)[None, :]
    in_head = dims < HEAD_DIM
    swapped = tl.where(dims < HEAD_DIM // 2, dims + HEAD_DIM // 2, dims - HEAD_DIM // 2)
    angles = tl.load(positions_ptr + row) * HEAD_DIM + dims
    cos = tl.load(cos_ptr + angles, mask=in_head, other=0.0)
    sin = tl.load(sin_ptr + angles, mask=in_head, other=0.0)
    block = tl.arange(0, HEAD_BLOCK)[:, None]
    row_ptr = qkv_ptr + row * (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for first_head in range(0, HEADS, HEAD_BLOCK):
        heads = first_head + block
        mask = (heads < HEADS) & in_head
        q = _rotate(
            row_ptr + heads * HEAD_DIM,
            q_norm_ptr,
            cos,
            sin,
            dims,
            swapped,
            mask,
            eps,
            HEAD_DIM,
            HAS_NORM,
        )
        at = q_ptr + row * HEADS * HEAD_DIM + heads * HEAD_DIM + dims
        tl.store(at, (q * q_scale).to(q_ptr.dtype.element_ty), mask=mask)
    slot = tl.load(slots_ptr + row)
    row_ptr += HEADS * HEAD_DIM
    for first_head in range(0, KV_HEADS, HEAD_BLOCK):
        heads = first_head + block
        mask = (heads < KV_HEADS) & in_head
        k = _rotate(
            row_ptr + heads * HEAD_DIM,
            k_norm_ptr,
            cos,
            sin,
            dims,
            swapped,
            mask,
            eps,
            HEAD_DIM,
            HAS_NORM,
        )
        v = tl.load(row_ptr + (KV_HEADS + heads) * HEAD_DIM + dims, mask=mask)
        at = (slot * KV_HEADS + heads) * HEAD_DIM + dims
        tl.store(k_ptr + at, k.to(k_ptr.dtype.element_ty), mask=mask)
        tl.store(v_ptr + at, v, mask=mask)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of each head of q and k. [head_dim] fp32."""

    q: Tensor
    k: Tensor
    eps: float


def rope_and_write(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_scale: float,
    norms: HeadNorms | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
) -> None:
    """Rotate q and k of each row to its position; write q, and K and V to their slots.

    qkv:       [num_rows, (num_heads + 2 * num_kv_heads) * head_dim] bf16 or fp32, contiguous
    positions, slots: [num_rows] int64
    cos, sin:  [max_len, head_dim] fp32, of a RotaryTable
    q:         [num_rows, num_heads * head_dim], written: times q_scale
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of one layer, written
    https://arxiv.org/abs/2104.09864, section 3.2.2.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_rows, num_heads = q.shape[0], q.shape[1] // head_dim
    assert qkv.shape == (num_rows, (num_heads + 2 * num_kv_heads) * head_dim)
    assert all(t.is_contiguous() for t in (qkv, positions, slots, q, k_cache, v_cache))
    rope_kernel[(num_rows,)](
        qkv,
        q,
        k_cache,
        v_cache,
        positions,
        slots,
        cos,
        sin,
        norms.q if norms else None,
        norms.k if norms else None,
        norms.eps if norms else 0.0,
        q_scale,
        num_heads,
        num_kv_heads,
        head_dim,
        triton.next_power_of_2(head_dim),
        HEAD_BLOCK,
        norms is not None,
        num_warps=NUM_WARPS,
    )
