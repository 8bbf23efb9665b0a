"""Root mean square normalisation, with the residual added first. Reference: ops/rmsnorm.py."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rmsnorm_kernel(
    x_ptr, delta_ptr, weight_ptr, out_ptr, hidden, eps, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    """One row. With a delta, x + delta goes back into x."""
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden
    at = tl.program_id(0).to(tl.int64) * hidden + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + at, mask=inside, other=0.0)
        # rounded before it is normalised: the residual stream is what later layers read
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    tl.store(out_ptr + at, (wide * scale * weight).to(x.dtype), mask=inside)


def block_of(hidden: int) -> tuple[int, int]:
    """Columns of a program, and its warps: 16 columns a thread, or more where 16 warps do not
    suffice."""
    block = triton.next_power_of_2(hidden)
    return block, min(16, max(1, block // 512))


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    x:      [num_rows, hidden] bf16 or fp32, contiguous
    weight: [hidden] fp32
    Returns the shape and dtype of x. https://arxiv.org/abs/1910.07467, equation 4.
    """
    return _launch(x, None, weight, eps)


def add_rmsnorm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x += delta, then rmsnorm(x). Shapes as there; delta like x."""
    assert delta.shape == x.shape and delta.dtype == x.dtype and delta.is_contiguous()
    return _launch(x, delta, weight, eps)


def _launch(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_rows, hidden = x.shape
    assert x.is_contiguous() and weight.shape == (hidden,)
    out = torch.empty_like(x)
    block, num_warps = block_of(hidden)
    rmsnorm_kernel[(num_rows,)](
        x, delta, weight, out, hidden, eps, delta is not None, block, num_warps=num_warps
    )
    return out
