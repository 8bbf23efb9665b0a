"""A model of random weights, made on the device, that engines of one process share.

What it says means nothing; how long it takes is what a trained model of its shapes takes. Nothing
of it is on a disk or, on a card, in the host's memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowprefill.bench.flops import weight_shapes
from flowprefill.bench.gpu.shapes import Shapes
from flowprefill.clock import Clock, MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.engine_model import EngineModel
from flowprefill.granularity import Granularity
from flowprefill.loading import LoadedModel, load_model, profile_model
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.predictor.profile import Profile
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.weights import DecoderWeights, LayerWeights, OnProgress


@dataclass(frozen=True)
class RandomModel:
    """A loaded model, its profile, and the weights that it was made of."""

    config: EngineConfig
    model: LoadedModel
    profile: Profile
    weights: DecoderWeights
    """On a card the tensors that the model uses, not copies."""

    def predictor(self, granularity: str = "tile") -> FittedPredictor:
        """What the profile showed, for prefills of that granularity."""
        spec, limits = self.model.spec, self.model.program.limits
        parsed = Granularity.parse(granularity)
        return FittedPredictor.from_profile(self.profile, spec.num_layers, limits, parsed)

    def for_engine(
        self, config: EngineConfig, clock: Clock, on_progress: OnProgress
    ) -> EngineModel:
        """What Engine takes as `load`; one engine at a time may have the model."""
        predictor = self.predictor(config.granularity)
        return EngineModel(config, self.model, predictor, self.profile.is_bit_invariant)


def load_random_model(
    shapes: Shapes,
    settings: Mapping[str, Any],
    folder: Path,
    seed: int,
    on_progress: OnProgress,
) -> tuple[EngineConfig, LoadedModel, DecoderWeights]:
    """Make and load a model without taking its profile.

    settings: fields of EngineConfig beside the model
    folder: gets config.json; needed no longer than this call
    Raises ConfigError if it has no room.
    """
    (folder / "config.json").write_text(json.dumps(dict(shapes)), encoding="utf-8")
    config = EngineConfig(str(folder), **settings)
    kept: list[DecoderWeights] = []

    def make(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
        on_progress("random weights", 0.0)
        weights = random_weights(spec, dtype, device, seed)
        kept.append(replace(weights, layers=list(weights.layers)))  # operators take them out
        on_progress("random weights", 1.0)
        return weights

    model = load_model(config, on_progress, make)
    return config, model, kept[0]


def profiled_random_model(
    shapes: Shapes,
    settings: Mapping[str, Any],
    folder: Path,
    seed: int,
    on_progress: OnProgress,
) -> RandomModel:
    """The same, with its profile."""
    config, model, weights = load_random_model(shapes, settings, folder, seed, on_progress)
    profile = profile_model(model, MonotonicClock(), on_progress)
    return RandomModel(config, model, profile, weights)


def random_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int
) -> DecoderWeights:
    """Weights that keep activations finite and of about one size; norms and biases are random too,
    so leaving one out shows."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float | None = None) -> Tensor:
        drawn = torch.randn(rows, columns, generator=generator, dtype=dtype, device=device)
        return drawn.mul_(columns**-0.5 if scale is None else scale)

    def norm(size: int) -> Tensor:
        drawn = torch.randn(size, generator=generator, dtype=torch.float32, device=device)
        return drawn.mul_(0.2).add_(1.0)

    sizes = weight_shapes(spec)

    def layer() -> LayerWeights:
        qkv_size = sizes["qkv"][1]
        return LayerWeights(
            input_norm=norm(spec.hidden_size),
            qkv=matrix(qkv_size, spec.hidden_size),
            qkv_bias=matrix(1, qkv_size)[0] if spec.qkv_bias else None,
            q_norm=norm(spec.head_dim) if spec.qk_norm else None,
            k_norm=norm(spec.head_dim) if spec.qk_norm else None,
            o_proj=matrix(spec.hidden_size, spec.q_size),
            post_norm=norm(spec.hidden_size),
            gate_up=matrix(2 * spec.intermediate_size, spec.hidden_size),
            down=matrix(spec.hidden_size, spec.intermediate_size),
        )

    embed = matrix(spec.vocab_size, spec.hidden_size, scale=1.0)
    layers = [layer() for _ in range(spec.num_layers)]
    last_norm = norm(spec.hidden_size)
    tied = spec.tie_word_embeddings
    lm_head = embed if tied else matrix(spec.vocab_size, spec.hidden_size)
    return DecoderWeights(embed, layers, last_norm, lm_head)


def weight_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of all matrices; norms and biases are next to nothing."""
    layer = sum(rows * columns for rows, columns in weight_shapes(spec).values())
    heads = (1 if spec.tie_word_embeddings else 2) * spec.vocab_size * spec.hidden_size
    return (spec.num_layers * layer + heads) * dtype.itemsize


def kv_bytes(spec: ModelSpec, dtype: torch.dtype, num_tokens: int) -> int:
    """K and V of so many tokens."""
    return num_tokens * spec.kv_bytes_per_token(dtype.itemsize)
