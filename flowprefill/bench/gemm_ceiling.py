"""The rate of torch's best matrix product on this machine: a ceiling for what a prefill can reach.

Knows neither our operators nor the program: oneDNN with a prepacked weight on a CPU that has one,
torch's own product elsewhere, at the shapes of the model's layers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from flowprefill.bench.flops import weight_shapes
from flowprefill.ops.linear import has_packed_product
from flowprefill.programs.model_spec import ModelSpec

ROWS = 512
_REPEATS = 5
_REPEAT_S = 0.02


@torch.inference_mode()
def gemm_flops(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of the fastest of the layer's products with 512 rows, best of some repeats of each."""
    rates = []
    for rows, columns in weight_shapes(spec).values():
        weight = torch.randn(columns, rows, dtype=torch.float32).mul_(0.02).to(device, dtype)
        x = torch.randn(ROWS, rows, dtype=torch.float32).to(device, dtype)
        seconds = _best_s(_product(x, weight), device)
        rates.append(2 * ROWS * rows * columns / seconds)
    return max(rates)


@torch.inference_mode()
def layer_product(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """The layer's largest product with 512 rows, to be repeated; returns when it is done."""
    rows, columns = max(weight_shapes(spec).values(), key=math.prod)
    weight = torch.randn(columns, rows, dtype=torch.float32).mul_(0.02).to(device, dtype)
    product = _product(torch.randn(ROWS, rows, dtype=torch.float32).to(device, dtype), weight)

    @torch.inference_mode()
    def run() -> None:
        product()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


def _product(x: Tensor, weight: Tensor) -> Callable[[], object]:
    if x.device.type != "cpu" or not has_packed_product(weight.dtype):
        return lambda: functional.linear(x, weight)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def _best_s(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, in the fastest of several stretches of calls."""
    run()
    once_s = _stretch_s(run, 1, device)
    calls = max(1, int(_REPEAT_S / max(once_s, 1e-6)))
    return min(_stretch_s(run, calls, device) / calls for _ in range(_REPEATS))


def _stretch_s(run: Callable[[], object], calls: int, device: torch.device) -> float:
    start_s = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start_s
