"""Decoders of any shape with random weights, behind either kind of operators."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.native_operators import NativeOperators
from flowprefill.programs.operators import Attended, Operators, Rows, SliceRun, slice_ends
from flowprefill.programs.torch_operators import TorchOperators
from flowprefill.programs.weights import DecoderWeights, LayerWeights
from tests.native_kernels import require_native

CPU = torch.device("cpu")
MAX_LEN = 1200
LAYER = 1
"""The layer that tests of single operators run: not the first, whose cache begins at 0."""


def make_spec(
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    vocab: int = 100,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    return ModelSpec(
        architecture="test",
        num_layers=2,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=MAX_LEN,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        eos_token_ids=(),
        bos_token_id=None,
    )


@lru_cache(maxsize=4)
def make_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> DecoderWeights:
    """Random weights that keep the size of activations."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(columns: int, inner: int) -> Tensor:
        return (torch.randn(columns, inner, generator=generator) * inner**-0.5).to(dtype)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    qkv_size = spec.q_size + 2 * spec.kv_size
    layers = [
        LayerWeights(
            input_norm=norm(spec.hidden_size),
            qkv=matrix(qkv_size, spec.hidden_size),
            qkv_bias=matrix(qkv_size, 1)[:, 0].contiguous() if spec.qkv_bias else None,
            q_norm=norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=norm(spec.head_dim) if spec.qk_norm else None,
            o_proj=matrix(spec.hidden_size, spec.q_size),
            post_norm=norm(spec.hidden_size),
            gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            down=matrix(spec.hidden_size, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    ]
    embed = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator).to(dtype)
    return DecoderWeights(
        embed, layers, norm(spec.hidden_size), matrix(spec.vocab_size, spec.hidden_size)
    )


def random_hidden(spec: ModelSpec, num_rows: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(num_rows, spec.hidden_size, generator=generator).to(dtype)


def join(rows: Sequence[Rows]) -> Rows:
    """The rows of several sequences, one behind the other."""
    return Rows(torch.cat([r.positions for r in rows]), torch.cat([r.slots for r in rows]))


@dataclass(frozen=True, eq=False)
class Decoder:
    """Operators, and sequences on blocks dealt at random from their cache."""

    spec: ModelSpec
    dtype: torch.dtype
    operators: Operators
    tables: list[BlockTable]

    def rows(self, sequence: int, start: int, end: int) -> Rows:
        """Rows of token positions start..end of a sequence."""
        return Rows(torch.arange(start, end), self.tables[sequence].slots(start, end))

    def attended(self, sequences: Sequence[int], first: Sequence[int]) -> Attended:
        return Attended([self.tables[i] for i in sequences], list(first))

    def qkv(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Queries [num_rows, q_size]; K and V are in the cache."""
        q = hidden.new_empty(len(hidden), self.spec.q_size)
        self.operators.qkv(LAYER, hidden, rows, q)
        return q

    def attention(self, q: Tensor, attended: Attended) -> Tensor:
        out = q.clone()
        self.operators.attention(LAYER, out, attended, SliceRun(slice_ends([len(q)])))
        return out

    def mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        out = hidden.clone()
        self.operators.mlp(LAYER, out, attended, SliceRun(slice_ends([len(hidden)])))
        return out

    def layer(self, hidden: Tensor, rows: Rows, attended: Attended) -> Tensor:
        out = hidden.clone()
        q = hidden.new_empty(len(hidden), self.spec.q_size)
        self.operators.layers(range(LAYER, LAYER + 1), out, rows, q, attended)
        return out

    def kv(self, sequence: int, start: int, end: int) -> Tensor:
        """K and V of LAYER: [2, tokens, num_kv_heads, head_dim]."""
        return self.operators.cache.read(self.tables[sequence].slots(start, end))[:, LAYER]

    def fill_cache(self, value: float) -> None:
        """All blocks that are handed out; the padding behind them has to be finite."""
        cache = self.operators.cache
        if cache.is_packed:
            cache.k.fill_(value)
            cache.v.fill_(value)
        else:
            cache.k[:, : cache.num_blocks].fill_(value)
            cache.v[:, : cache.num_blocks].fill_(value)


def make_decoder(
    kernels: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    *,
    num_threads: int = 2,
    block_size: int = 16,
    num_sequences: int = 2,
    max_len: int = MAX_LEN,
    weights: DecoderWeights | None = None,
) -> Decoder:
    """Skips the test where `kernels` cannot run. What no one has written in the cache is NaN.

    weights: None = those of make_weights
    """
    is_native = kernels == "native"
    if is_native:
        require_native(dtype)
    weights = weights or make_weights(spec, dtype)
    weights = replace(weights, layers=list(weights.layers))  # operators take the layers out
    share = -(-max_len // block_size)
    cache = KVCache(
        share * num_sequences,
        block_size,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=CPU,
        is_packed=is_native,
    )
    operators: Operators
    if is_native:
        operators = NativeOperators(spec, weights, cache, num_threads)
    else:
        operators = TorchOperators(spec, weights, cache)
    blocks = random.Random(0).sample(range(cache.num_blocks), cache.num_blocks)
    tables = [
        BlockTable(blocks[i * share : (i + 1) * share], block_size, CPU)
        for i in range(num_sequences)
    ]
    decoder = Decoder(spec, dtype, operators, tables)
    decoder.fill_cache(float("nan"))
    return decoder
