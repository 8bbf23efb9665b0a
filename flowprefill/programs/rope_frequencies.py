"""Rotation frequencies of a model, with its checkpoint's context scaling applied."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flowprefill.programs.model_spec import ModelSpec


def rope_frequencies(spec: ModelSpec) -> Tensor:
    """[head_dim / 2] fp32, radians per position. https://arxiv.org/abs/2104.09864, equation 15."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: long wavelengths are stretched, short ones kept, with a linear blend between
    wavelengths = 2 * math.pi / frequencies
    context = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies
