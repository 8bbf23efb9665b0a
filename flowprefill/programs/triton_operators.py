"""The operators of a decoder of the Llama kind as Triton kernels; matrix products stay torch's.

Runs on CUDA, and with TRITON_INTERPRET=1 on a CPU, for tests. There a pass that was parked has the
bits of one that was not. A row's bits are the same whatever shares its call as far as those of the
products are, whose kernel cuBLAS chooses by the number of rows.
"""

# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import torch
import triton
from torch import Tensor

from flowprefill.kernels import TritonUnavailableError
from flowprefill.kernels.activation import silu_and_mul
from flowprefill.kernels.attention import (
    MAX_HEAD_DIM,
    decode_tiling,
    paged_attention,
    prefill_tiling,
)
from flowprefill.kernels.rmsnorm import add_rmsnorm, rmsnorm
from flowprefill.kernels.rope import HeadNorms, rope_and_write
from flowprefill.kv.cache import KVCache
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.operators import Attended, Rows
from flowprefill.programs.torch_operators import TorchOperators
from flowprefill.programs.weights import DecoderWeights


def build_name() -> str:
    """What the kernels are compiled by."""
    return str(triton.__version__)


class TritonOperators(TorchOperators):
    """Implements Operators."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights, cache: KVCache) -> None:
        """Takes the layers out of `weights`, so that no second copy of them stays."""
        super().__init__(spec, weights, cache)
        dtype = weights.embed.dtype
        self._prefill_tiling = prefill_tiling(spec.head_dim, dtype)
        self._decode_tiling = decode_tiling(spec.head_dim, dtype)

    def qkv(self, layer: int, hidden: Tensor, rows: Rows, q: Tensor) -> None:
        spec, weights = self._spec, self._layers[layer]
        norms = None
        if weights.q_norm is not None and weights.k_norm is not None:
            norms = HeadNorms(weights.q_norm, weights.k_norm, spec.rms_norm_eps)
        rope_and_write(
            weights.qkv(rmsnorm(hidden, weights.input_norm, spec.rms_norm_eps)),
            rows.positions,
            rows.slots,
            self._rotary.cos,
            self._rotary.sin,
            self._query_scale,
            norms,
            q,
            self.cache.k[layer],
            self.cache.v[layer],
        )

    def _attend(self, layer: int, q: Tensor, attended: Attended) -> None:
        num_rows = len(q) // len(attended.tables)
        paged_attention(
            q.view(-1, self._spec.num_heads, self._spec.head_dim),
            self.cache.k[layer],
            self.cache.v[layer],
            attended.placed(num_rows),
            num_rows,
            max(attended.first) + num_rows,
            # not by num_rows: a prompt's rows have the same bits in a tile of one row
            self._decode_tiling if attended.is_newest else self._prefill_tiling,
        )

    def _feed_forward(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        weights, eps = self._layers[layer], self._spec.rms_norm_eps
        normed = add_rmsnorm(hidden, weights.o_proj(attended), weights.post_norm, eps)
        hidden += weights.down(silu_and_mul(weights.gate_up(normed)))

    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(rmsnorm(hidden, self._norm, self._spec.rms_norm_eps)).float()


def check_support(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device
) -> None:
    """Raises TritonUnavailableError if the kernels cannot run this model on this device."""
    if spec.head_dim > MAX_HEAD_DIM:
        raise TritonUnavailableError(f"head_dim={spec.head_dim}: at most {MAX_HEAD_DIM}")
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise TritonUnavailableError("they need device='cuda'")
    try:
        _run_each(spec, dtype, block_size, device)
    # whatever a compiler, a driver or a card that is too old may raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise TritonUnavailableError(f"{type(error).__name__}: {lines[0]}") from error


def _run_each(spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device) -> None:
    """Compile and run the kernels on one row."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    row, weight = zeros(1, spec.hidden_size), zeros(spec.hidden_size, dtype=torch.float32)
    add_rmsnorm(row, rmsnorm(row, weight, 1.0), weight, 1.0)
    silu_and_mul(zeros(1, 2 * spec.intermediate_size))
    k, v = zeros(2, 1, block_size, spec.num_kv_heads, spec.head_dim)
    q, position = zeros(1, spec.q_size), zeros(1, dtype=torch.int64)
    angles = zeros(1, spec.head_dim, dtype=torch.float32)
    norm = angles[0]
    norms = HeadNorms(norm, norm, 1.0) if spec.qk_norm else None
    qkv = zeros(1, spec.q_size + 2 * spec.kv_size)
    rope_and_write(qkv, position, position, angles, angles, 1.0, norms, q, k, v)
    q = q.view(1, spec.num_heads, spec.head_dim)
    sequences = torch.tensor([[position.data_ptr(), 0, 0, 1]], device=device)
    for tiling in (prefill_tiling(spec.head_dim, dtype), decode_tiling(spec.head_dim, dtype)):
        for max_keys in (1, tiling.split + 1):
            paged_attention(q, k, v, sequences, 1, max_keys, tiling)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
