"""Gated activation of the feed-forward block. Reference: ops/mlp.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Columns of a program."""
NUM_WARPS = 4


@triton.jit
def silu_and_mul_kernel(gate_up_ptr, out_ptr, intermediate, BLOCK: tl.constexpr):
    """Some columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < intermediate
    gate_at = gate_up_ptr + row * 2 * intermediate + columns
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + intermediate, mask=inside, other=0.0)
    out = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out_ptr + row * intermediate + columns, out.to(up.dtype), mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, rounded once.

    gate_up: [num_rows, 2 * intermediate], contiguous, the gate half first.
    Returns [num_rows, intermediate]. https://arxiv.org/abs/2002.05202, section 2 (SwiGLU).
    """
    assert gate_up.is_contiguous()
    num_rows, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, intermediate)
    grid = num_rows, triton.cdiv(intermediate, BLOCK)
    silu_and_mul_kernel[grid](gate_up, out, intermediate, BLOCK, num_warps=NUM_WARPS)
    return out
