"""The operators of a decoder of the Llama kind in plain torch, for any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flowprefill.kv.cache import KVCache
from flowprefill.kv.host_copies import to_device
from flowprefill.ops.attention import paged_attention, query_scale
from flowprefill.ops.linear import Linear
from flowprefill.ops.mlp import silu_and_mul
from flowprefill.ops.rmsnorm import rmsnorm
from flowprefill.ops.rope import RotaryTable
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.operators import Attended, Rows, SliceRun
from flowprefill.programs.rope_frequencies import rope_frequencies
from flowprefill.programs.weights import DecoderWeights, LayerWeights

SumRanks: TypeAlias = Callable[[Tensor], Tensor]
"""Of a model that is divided among ranks: the sum of each rank's products. May overwrite them."""


class _Layer:
    """One layer's weights, packed."""

    def __init__(self, weights: LayerWeights) -> None:
        self.input_norm = weights.input_norm
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.q_norm = weights.q_norm
        self.k_norm = weights.k_norm
        self.o_proj = Linear(weights.o_proj)
        self.post_norm = weights.post_norm
        self.gate_up = Linear(weights.gate_up)
        self.down = Linear(weights.down)


class TorchOperators:
    """Implements Operators."""

    runs_several_slices = False

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        cache: KVCache,
        sum_ranks: SumRanks | None = None,
    ) -> None:
        """Takes the layers out of `weights`, so that no second copy of them stays.

        spec, weights, cache: of this rank's part, where the model is divided; None = it is not
        """
        self.cache = cache
        self._spec = spec
        self._device = weights.embed.device
        self._embed = weights.embed
        self._norm = weights.norm
        self._layers = [_Layer(weights.layers.pop(0)) for _ in range(spec.num_layers)]
        self._lm_head = Linear(weights.lm_head)
        self._rotary = RotaryTable(
            rope_frequencies(spec), spec.max_position_embeddings, self._device
        )
        self._query_scale = query_scale(spec.head_dim)
        self._sum_ranks = sum_ranks or (lambda product: product)

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._embed[to_device(token_ids, self._device)]

    def qkv(self, layer: int, hidden: Tensor, rows: Rows, q: Tensor) -> None:
        spec, weights = self._spec, self._layers[layer]
        qkv = weights.qkv(rmsnorm(hidden, weights.input_norm, spec.rms_norm_eps))
        qk, v = qkv.split([spec.q_size + spec.kv_size, spec.kv_size], dim=-1)
        qk = qk.view(-1, spec.num_heads + spec.num_kv_heads, spec.head_dim)
        if weights.q_norm is not None and weights.k_norm is not None:
            heads, kv_heads = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
            heads = rmsnorm(heads, weights.q_norm, spec.rms_norm_eps)
            kv_heads = rmsnorm(kv_heads, weights.k_norm, spec.rms_norm_eps)
            qk = torch.cat([heads, kv_heads], dim=1)
        qk = self._rotary.apply(qk.float(), rows.positions)
        heads, k = qk.split([spec.num_heads, spec.num_kv_heads], dim=1)
        self.cache.write(layer, rows.slots, k, v.view(-1, spec.num_kv_heads, spec.head_dim))
        q.copy_(heads.mul(self._query_scale).reshape(-1, spec.q_size))

    def attention(self, layer: int, q: Tensor, attended: Attended, run: SliceRun) -> int:
        self._attend(layer, q[: run.ends[0]], attended)
        return 1

    def _attend(self, layer: int, q: Tensor, attended: Attended) -> None:
        num_seqs = len(attended.tables)
        per_seq = q.view(num_seqs, -1, self._spec.num_heads, self._spec.head_dim)
        order = sorted(range(num_seqs), key=lambda i: -attended.first[i])
        rows = to_device(order, q.device)
        out = paged_attention(
            per_seq[rows] if num_seqs > 1 else per_seq,
            self.cache.k[layer],
            self.cache.v[layer],
            [attended.tables[i] for i in order],
            [attended.first[i] for i in order],
        )
        per_seq[rows] = out

    def mlp(self, layer: int, hidden: Tensor, attended: Tensor, run: SliceRun) -> int:
        num_rows = run.ends[0]
        self._feed_forward(layer, hidden[:num_rows], attended[:num_rows])
        return 1

    def _feed_forward(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        weights = self._layers[layer]
        hidden += self._sum_ranks(weights.o_proj(attended))
        normed = rmsnorm(hidden, weights.post_norm, self._spec.rms_norm_eps)
        hidden += self._sum_ranks(weights.down(silu_and_mul(weights.gate_up(normed))))

    def layers(
        self, layers: range, hidden: Tensor, rows: Rows, q: Tensor, attended: Attended
    ) -> None:
        for layer in layers:
            self.qkv(layer, hidden, rows, q)
            self._attend(layer, q, attended)
            self._feed_forward(layer, hidden, q)

    def logits(self, hidden: Tensor) -> Tensor:
        normed = rmsnorm(hidden, self._norm, self._spec.rms_norm_eps)
        return self._lm_head(normed).float()
