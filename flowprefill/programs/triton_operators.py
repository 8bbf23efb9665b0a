"""The operators of a decoder of the Llama kind as Triton kernels; matrix products stay torch's.

Runs on CUDA, and with TRITON_INTERPRET=1 on a CPU, for tests. There a pass that was parked has the
bits of one that was not. A row's bits are the same whatever shares its call as far as those of the
products are, whose kernel cuBLAS chooses by the number of rows.
"""

# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import operator

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
from flowprefill.programs.decode_graphs import (
    MAX_ROWS,
    Capturer,
    CudaCapturer,
    DecodeGraphs,
    make_buckets,
)
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.operators import Attended, Rows
from flowprefill.programs.torch_operators import SumRanks, TorchOperators
from flowprefill.programs.weights import DecoderWeights


def build_name() -> str:
    """What the kernels are compiled by."""
    return str(triton.__version__)


class TritonOperators(TorchOperators):
    """Implements Operators."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        cache: KVCache,
        sum_ranks: SumRanks | None = None,
    ) -> None:
        """See TorchOperators."""
        super().__init__(spec, weights, cache, sum_ranks)
        self.graphs: DecodeGraphs | None = None
        """Of decode steps, if they were recorded."""
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
        num_rows = attended.rows_of_each(len(q))
        paged_attention(
            q.view(-1, self._spec.num_heads, self._spec.head_dim),
            self.cache.k[layer],
            self.cache.v[layer],
            attended.placed(len(q)),
            max(num_rows),
            max(map(operator.add, attended.first, num_rows)),
            # not by num_rows: a prompt's rows have the same bits in a tile of one row
            self._decode_tiling if attended.is_newest else self._prefill_tiling,
        )

    def _feed_forward(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        weights, eps = self._layers[layer], self._spec.rms_norm_eps
        projected = self._sum_ranks(weights.o_proj(attended))
        normed = add_rmsnorm(hidden, projected, weights.post_norm, eps)
        hidden += self._sum_ranks(weights.down(silu_and_mul(weights.gate_up(normed))))

    def layers(
        self, layers: range, hidden: Tensor, rows: Rows, q: Tensor, attended: Attended
    ) -> None:
        if self.graphs is None or not self.graphs.run(layers, hidden, attended):
            super().layers(layers, hidden, rows, q, attended)

    def record_graphs(self, capturer: Capturer, max_rows: int = MAX_ROWS) -> None:
        """Have decode steps run as graphs from now on. Raises what recording raises."""
        spec, hidden = self._spec, self._embed[:1]
        graphs = DecodeGraphs(
            self._launch_layer,
            spec.num_layers,
            self.cache,
            (hidden, hidden.new_empty(1, spec.q_size)),
            make_buckets(spec.max_position_embeddings, self._decode_tiling.split, max_rows),
        )
        graphs.record(capturer)
        self.graphs = graphs

    def _launch_layer(
        self, layer: int, hidden: Tensor, rows: Rows, q: Tensor, attended: Attended
    ) -> None:
        super().layers(range(layer, layer + 1), hidden, rows, q, attended)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._lm_head(rmsnorm(hidden, self._norm, self._spec.rms_norm_eps)).float()


def make_operators(
    spec: ModelSpec, weights: DecoderWeights, cache: KVCache, sum_ranks: SumRanks | None = None
) -> tuple[TritonOperators, str]:
    """The operators, and name and build of their kernels. On CUDA decode steps are graphs, if they
    can be."""
    operators = TritonOperators(spec, weights, cache, sum_ranks)
    name = f"triton {build_name()}"
    if sum_ranks is not None:
        return operators, f"{name}, no decode graphs"  # they would hold sums over the ranks
    if weights.embed.device.type != "cuda":
        return operators, name
    try:
        operators.record_graphs(CudaCapturer())
    # whatever a driver or a compiler may raise, or memory does not suffice: the model runs without
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return operators, f"{name}, no decode graphs: {reason[0]}"
    return operators, f"{name}, decode graphs"


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
