"""A decoder layer in fp64, written down as the formulas say, for one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from flowprefill.ops.attention import query_scale
from flowprefill.ops.rope import RotaryTable
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.rope_frequencies import rope_frequencies
from flowprefill.programs.weights import DecoderWeights


class Reference:
    """Operators on fp64 tensors of one sequence. Queries are times query_scale, as elsewhere."""

    def __init__(self, spec: ModelSpec, weights: DecoderWeights) -> None:
        self.spec = spec
        self.weights = weights
        # the same table as the operators have: an angle rounded to fp32 is an input
        self._rotary = RotaryTable(
            rope_frequencies(spec), spec.max_position_embeddings, torch.device("cpu")
        )

    def qkv(self, layer: int, hidden: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """hidden: rows of positions `start` and after.

        Returns q, k, v: [num_rows, heads, head_dim].
        """
        spec, weights = self.spec, self.weights.layers[layer]
        x = self._norm(hidden.double(), weights.input_norm) @ weights.qkv.double().T
        if weights.qkv_bias is not None:
            x = x + weights.qkv_bias.double()
        heads = x.view(len(x), -1, spec.head_dim)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = self._norm(q, weights.q_norm), self._norm(k, weights.k_norm)
        return self._rotate(q, start) * query_scale(spec.head_dim), self._rotate(k, start), v

    def attention(self, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
        """q: [num_rows, q_size] from position `first` on; k, v: [>= first + num_rows, heads, dim].

        Returns [num_rows, q_size].
        """
        spec = self.spec
        num_keys = first + len(q)
        group = spec.num_heads // spec.num_kv_heads
        k, v = (t[:num_keys].double().repeat_interleave(group, dim=1) for t in (k, v))
        heads = q.double().view(len(q), spec.num_heads, spec.head_dim)
        scores = torch.einsum("rhd,khd->hrk", heads, k)
        future = torch.arange(num_keys) > first + torch.arange(len(q)).unsqueeze(1)
        scores = scores.masked_fill(future, -torch.inf)
        # base 2: log2(e) is in query_scale
        probs = torch.exp2(scores - scores.amax(-1, keepdim=True))
        probs = probs / probs.sum(-1, keepdim=True)
        return torch.einsum("hrk,khd->rhd", probs, v).reshape(len(q), -1)

    def mlp(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        weights = self.weights.layers[layer]
        residual = hidden.double() + attended.double() @ weights.o_proj.double().T
        x = self._norm(residual, weights.post_norm) @ weights.gate_up.double().T
        gate, up = x.chunk(2, dim=-1)
        return residual + (torch.sigmoid(gate) * gate * up) @ weights.down.double().T

    def logits(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden.double(), self.weights.norm) @ self.weights.lm_head.double().T

    def prefill(self, token_ids: list[int]) -> Tensor:
        """Logits [num_tokens, vocab] of a whole prompt."""
        hidden = self.weights.embed[torch.tensor(token_ids)].double()
        for layer in range(self.spec.num_layers):
            q, k, v = self.qkv(layer, hidden, 0)
            hidden = self.mlp(layer, hidden, self.attention(q.flatten(1), k, v, 0))
        return self.logits(hidden)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        mean = x.square().mean(-1, keepdim=True)
        return x / (mean + self.spec.rms_norm_eps).sqrt() * weight.double()

    def _rotate(self, x: Tensor, start: int) -> Tensor:
        half = self.spec.head_dim // 2
        rows = slice(start, start + len(x))
        cos = self._rotary.cos[rows, None, :half].double()
        sin = self._rotary.sin[rows, None, half:].double()
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
