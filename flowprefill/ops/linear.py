"""Matrix product with a weight that is packed once, and whose rows do not see each other.

On a CPU the product goes through oneDNN's linear with a prepacked weight: there the result of a row
does not depend on how many rows share the call, except for a lone row, which takes a matrix-vector
path; so a lone row is computed twice over. torch's default fp32 path (MKL) has no such property.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class Linear:
    """y = x @ weight.T + bias.

    weight: [out_features, in_features] bf16 or fp32; bias: [out_features] or None, same dtype.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = weight.device.type == "cpu" and has_packed_product(weight.dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in_features], contiguous. Returns [num_rows, out_features]."""
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        num_rows = x.shape[0]
        if num_rows == 1:
            x = x.expand(2, -1).contiguous()
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return y[:num_rows]


def has_packed_product(dtype: torch.dtype) -> bool:
    """oneDNN's bf16 wants AVX-512; without it torch's own product is slow, but it is there."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
