"""Root mean square normalisation, computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension.

    x:      [..., hidden] bf16 or fp32
    weight: [hidden] fp32
    Returns the shape and dtype of x. https://arxiv.org/abs/1910.07467, equation 4.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
