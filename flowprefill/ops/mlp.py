"""Gated activation of the feed-forward block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    gate_up: [num_rows, 2 * intermediate], the gate half first. Returns [num_rows, intermediate].
    https://arxiv.org/abs/2002.05202, section 2 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
