"""Rotary position embedding in the half-rotation layout of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


class RotaryTable:
    """cos and sin of every position, fp32 [max_len, head_dim]; the halves repeat."""

    def __init__(self, frequencies: Tensor, max_len: int, device: torch.device) -> None:
        """frequencies: [head_dim / 2] fp32, radians per position."""
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), frequencies)
        angles = torch.cat([angles, angles], dim=-1).to(device)
        self.cos = angles.cos()
        self.sin = angles.sin()
        # x * cos + swap(x) * sin, where swap exchanges the halves: the sign goes into the table
        self.sin[:, : frequencies.shape[0]].neg_()

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate each head of each row to its position.

        x: [num_rows, heads, head_dim] fp32; positions: [num_rows] int64.
        Returns the shape of x, fp32. https://arxiv.org/abs/2104.09864, section 3.2.2.
        """
        half = x.shape[-1] // 2
        swapped = torch.cat([x[..., half:], x[..., :half]], dim=-1)
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return (x * cos).addcmul_(swapped, sin)
