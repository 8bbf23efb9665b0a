"""Weights of a decoder from a GGUF file or a safetensors directory, fused as the programs use them.

Every tensor is copied row block by row block into its final place, so that loading never holds a
second copy of the model. Rotation pairs end up half a head apart (the Hugging Face layout). What
was made of a GGUF file is kept on disk (weights_cache.py): later loads do not dequantise.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowprefill.errors import ModelLoadError
from flowprefill.programs.checkpoint import Checkpoint, open_checkpoint
from flowprefill.programs.family import ModelSpec, TensorNames
from flowprefill.programs.model_spec import find_architecture
from flowprefill.programs.sharding import WHOLE, Shard, ShardedCheckpoint
from flowprefill.programs.weights_cache import WeightsCache, WeightsKey

FUSED_LAYOUT = 1
"""Part of the cache's key; raised when other tensors would be made of the same file."""
_ELEMENTS_PER_READ = 1 << 23  # 32 MiB of fp32 at a time
_LOAD_STAGE = "load weights"

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """One decoder layer. Norms are fp32, all else in the dtype asked for."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[(num_heads + 2 * num_kv_heads) * head_dim, hidden]: rows of q, then k, then v."""
    qkv_bias: Tensor | None
    """[(num_heads + 2 * num_kv_heads) * head_dim]"""
    q_norm: Tensor | None
    """[head_dim]"""
    k_norm: Tensor | None
    """[head_dim]"""
    o_proj: Tensor
    """[hidden, num_heads * head_dim]"""
    post_norm: Tensor
    """[hidden]"""
    gate_up: Tensor
    """[2 * intermediate, hidden]: rows of gate, then up."""
    down: Tensor
    """[hidden, intermediate]"""


@dataclass(frozen=True, eq=False)
class DecoderWeights:
    """A whole decoder, on the CPU."""

    embed: Tensor
    """[vocab, hidden]"""
    layers: list[LayerWeights]
    norm: Tensor
    """[hidden] fp32"""
    lm_head: Tensor
    """[vocab, hidden]; the same tensor object as `embed` when they are tied."""

    def to(self, device: torch.device) -> DecoderWeights:
        """The same weights on `device`; tied tensors stay tied."""
        if device.type == "cpu":
            return self
        layers = [
            replace(layer, **{f.name: _to(getattr(layer, f.name), device) for f in fields(layer)})
            for layer in self.layers
        ]
        embed = self.embed.to(device)
        lm_head = embed if self.lm_head is self.embed else self.lm_head.to(device)
        return DecoderWeights(embed, layers, self.norm.to(device), lm_head)


def _to(tensor: Any, device: torch.device) -> Any:
    return None if tensor is None else tensor.to(device)


def load_weights(
    path: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    on_progress: OnProgress | None = None,
    cache: WeightsCache | None = None,
    shard: Shard = WHOLE,
) -> DecoderWeights:
    """Load the model at `path` (a .gguf file or a Hugging Face directory) as `dtype`.

    on_progress: called with ("load weights", fraction done in 0..1), once per layer; instead, with
    ("weights from the cache", 1.0). Weights that are not kept cost a stage of their own that says
    why.
    cache: where weights of GGUF files are kept; None = the user's. Matrices that were found there
    are mapped: dropping a layer gives its memory back.
    shard: what of the model is loaded; `spec` is that part's
    Raises ModelLoadError naming the tensor if one is missing, has another shape than `spec` says
    (both are named) or a type that cannot be read, or is not part of the architecture: ignoring it
    would change the answers.
    """
    report = on_progress or (lambda stage, fraction: None)
    if path.is_dir():
        return _read_weights(path, spec, dtype, report, shard)
    cache = cache or WeightsCache(WeightsCache.default_directory())
    key = _cache_key(path, spec, dtype, shard)
    named = cache.load(key)
    if named is not None:
        report("weights from the cache", 1.0)
        return _from_named(named, spec)
    weights = _read_weights(path, spec, dtype, report, shard)
    problem = cache.try_store(key, _to_named(weights))
    if problem:
        report(f"weights not kept for later loads: {problem}", 1.0)
    return weights


def _read_weights(
    path: Path, spec: ModelSpec, dtype: torch.dtype, report: OnProgress, shard: Shard
) -> DecoderWeights:
    architecture = find_architecture(path, spec.architecture)
    with open_checkpoint(path) as checkpoint:
        if shard != WHOLE:
            names = architecture.names
            checkpoint = ShardedCheckpoint(checkpoint, names, spec.num_layers, shard)
        loader = _Loader(checkpoint, architecture.names, spec, dtype)
        report(_LOAD_STAGE, 0.0)
        weights = loader.load(
            architecture.interleaved_rope, lambda fraction: report(_LOAD_STAGE, fraction)
        )
        loader.check_nothing_is_left()
    return weights


def _cache_key(path: Path, spec: ModelSpec, dtype: torch.dtype, shard: Shard) -> WeightsKey:
    reader = f"layout {FUSED_LAYOUT}, gguf {importlib.metadata.version('gguf')}"
    # The context that model.json asks for changes no weight.
    variant = f"{dtype} {replace(spec, max_position_embeddings=0)}"
    if shard != WHOLE:
        variant += f" {shard}"
    try:
        return WeightsKey.of_file(path, reader, variant)
    except OSError as error:
        raise ModelLoadError(f"{path}: not a readable GGUF file: {error}") from error


def _to_named(weights: DecoderWeights) -> dict[str, Tensor]:
    """All tensors by name; of tied ones only `embed`."""
    named = {"embed": weights.embed, "norm": weights.norm, "lm_head": weights.lm_head}
    if weights.lm_head is weights.embed:
        del named["lm_head"]
    for i, layer in enumerate(weights.layers):
        tensors = {f"layers.{i}.{f.name}": getattr(layer, f.name) for f in fields(layer)}
        named |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return named


def _from_named(named: Mapping[str, Tensor], spec: ModelSpec) -> DecoderWeights:
    layers = []
    for i in range(spec.num_layers):
        tensors: Any = {f.name: named.get(f"layers.{i}.{f.name}") for f in fields(LayerWeights)}
        layers.append(LayerWeights(**tensors))
    embed = named["embed"]
    return DecoderWeights(embed, layers, named["norm"], named.get("lm_head", embed))


class _Loader:
    """Fills fused tensors from a checkpoint and remembers which of its tensors were used."""

    def __init__(
        self, checkpoint: Checkpoint, names: TensorNames, spec: ModelSpec, dtype: torch.dtype
    ) -> None:
        self._checkpoint = checkpoint
        self._available = frozenset(checkpoint.names)
        self._used: set[str] = set()
        self._names = names
        self._spec = spec
        self._dtype = dtype

    def load(self, interleaved_rope: bool, report: Callable[[float], None]) -> DecoderWeights:
        spec, names = self._spec, self._names
        num_steps = spec.num_layers + (1 if spec.tie_word_embeddings else 2)
        embed = self._fused([(names.embed, spec.vocab_size)], spec.hidden_size)
        layers = []
        for i in range(spec.num_layers):
            report((i + 1) / num_steps)
            layers.append(self._layer(i, interleaved_rope))
        norm = self._norm(names.norm, spec.hidden_size)
        lm_head = embed
        if not spec.tie_word_embeddings:
            lm_head = self._fused([(names.lm_head, spec.vocab_size)], spec.hidden_size)
        report(1.0)
        return DecoderWeights(embed, layers, norm, lm_head)

    def check_nothing_is_left(self) -> None:
        """Raise ModelLoadError if the checkpoint has weights that the program would ignore."""
        left = self._available - self._used
        if self._spec.tie_word_embeddings:
            left -= {self._names.lm_head}
        # Old checkpoints store the rotary frequencies, which follow from the config.
        unknown = sorted(name for name in left if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise ModelLoadError(
                f"tensor {unknown[0]} is not part of {self._spec.architecture} as configured "
                f"({len(unknown)} such tensors)"
            )

    def _layer(self, index: int, interleaved_rope: bool) -> LayerWeights:
        spec, names = self._spec, self._names
        hidden, q_size, kv_size = spec.hidden_size, spec.q_size, spec.kv_size

        def name(template: str) -> str:
            return template.format(index)

        qkv_rows = [q_size, kv_size, kv_size]
        qkv_names = [name(t) for t in (names.q, names.k, names.v)]
        qkv = self._fused(list(zip(qkv_names, qkv_rows, strict=True)), hidden)
        if interleaved_rope:
            _pair_rows_half_a_head_apart(qkv[:q_size], spec.num_heads)
            _pair_rows_half_a_head_apart(qkv[q_size : q_size + kv_size], spec.num_kv_heads)
        qkv_bias = None
        if names.qkv_bias is not None:
            bias_names = [name(t) for t in names.qkv_bias]
            qkv_bias = self._fused(list(zip(bias_names, qkv_rows, strict=True)), None)
        q_norm, k_norm = (
            [self._norm(name(t), spec.head_dim) for t in names.qk_norm]
            if names.qk_norm
            else (None, None)
        )
        gate_up = [(name(t), spec.intermediate_size) for t in (names.gate, names.up)]
        return LayerWeights(
            input_norm=self._norm(name(names.input_norm), hidden),
            qkv=qkv,
            qkv_bias=qkv_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            o_proj=self._fused([(name(names.o), hidden)], q_size),
            post_norm=self._norm(name(names.post_norm), hidden),
            gate_up=self._fused(gate_up, hidden),
            down=self._fused([(name(names.down), hidden)], spec.intermediate_size),
        )

    def _norm(self, name: str, size: int) -> Tensor:
        self._claim(name, (size,))
        norm = torch.empty(size, dtype=torch.float32)
        self._copy(name, norm)
        return norm

    def _fused(self, parts: Sequence[tuple[str, int]], columns: int | None) -> Tensor:
        """Stack tensors of (name, rows) over each other; columns None = they are vectors."""
        row_shape = () if columns is None else (columns,)
        for name, rows in parts:
            self._claim(name, (rows, *row_shape))
        num_rows = sum(rows for _, rows in parts)
        fused = torch.empty(num_rows, *row_shape, dtype=self._dtype)
        start = 0
        for name, rows in parts:
            self._copy(name, fused[start : start + rows])
            start += rows
        return fused

    def _claim(self, name: str, expected: tuple[int, ...]) -> None:
        """Check a tensor before memory is taken for it, and note that it is used."""
        if name not in self._available:
            raise ModelLoadError(f"tensor {name} is missing; expected {list(expected)}")
        shape = self._checkpoint.shape(name)
        if shape != expected:
            raise ModelLoadError(
                f"tensor {name} has shape {list(shape)}; expected {list(expected)}"
            )
        self._used.add(name)

    def _copy(self, name: str, target: Tensor) -> None:
        num_rows = target.shape[0]
        rows_per_read = max(1, _ELEMENTS_PER_READ // target[0].numel())
        for start in range(0, num_rows, rows_per_read):
            stop = min(start + rows_per_read, num_rows)
            target[start:stop].copy_(self._checkpoint.read_rows(name, start, stop))


def _pair_rows_half_a_head_apart(weight: Tensor, num_heads: int) -> None:
    """Reorder the rows of each head in place: x0 y0 x1 y1 .. -> x0 x1 .. y0 y1 .."""
    pairs = weight.view(num_heads, -1, 2, weight.shape[1])  # [heads, head_dim / 2, pair, hidden]
    weight.copy_(pairs.transpose(1, 2).reshape(weight.shape))
