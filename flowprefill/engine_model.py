"""Which kind of program runs a model: our own operators, or a hooked transformers model.

The latter, and transformers with it, is imported only where it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flowprefill.clock import Clock
from flowprefill.config import EngineConfig
from flowprefill.errors import UnsupportedArchitectureError
from flowprefill.executor.device import make_device
from flowprefill.granularity import Granularity
from flowprefill.host_memory import available_bytes
from flowprefill.loading import (
    LoadedModel,
    kv_cache_bytes,
    load_model,
    profile_model,
)
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.programs.model_spec import read_model_spec, resolve_model_path
from flowprefill.programs.weights import OnProgress

if TYPE_CHECKING:
    from flowprefill.hooks.loading import HookedModel


@dataclass(frozen=True)
class EngineModel:
    """All that an engine has of its model."""

    config: EngineConfig
    """What the engine runs by: where caches cannot be shared, without prefix caching."""
    model: LoadedModel | HookedModel
    predictor: FittedPredictor
    is_bit_invariant: bool


def load_for_engine(config: EngineConfig, clock: Clock, on_progress: OnProgress) -> EngineModel:
    """Load and profile what model.json names. Raises ConfigError or ModelLoadError."""
    path = resolve_model_path(config.model)
    granularity = Granularity.parse(config.granularity)
    architecture = _hooked_architecture(config, path, on_progress)
    if architecture:
        hooked = _load_hooked(config, path, architecture, on_progress)
        profile = hooked.profile(clock, on_progress)
        predictor: FittedPredictor = hooked.predictor(profile, granularity)
        return EngineModel(hooked.config, hooked, predictor, profile.is_bit_invariant)
    model = load_model(config, on_progress)
    profile = profile_model(model, clock, on_progress)
    predictor = FittedPredictor.from_profile(
        profile, model.spec.num_layers, model.program.limits, granularity
    )
    return EngineModel(config, model, predictor, profile.is_bit_invariant)


def _hooked_architecture(config: EngineConfig, path: Path, on_progress: OnProgress) -> str | None:
    """Of a model that is to be hooked; None = our own operators run it. Raises
    UnsupportedArchitectureError if neither kind of program, or not the one asked for, can."""
    from flowprefill.hooks.availability import check_available

    if config.program != "auto":
        return check_available(path) if config.program == "hooks" else None
    try:
        read_model_spec(path)
    except UnsupportedArchitectureError as error:
        if not path.is_dir():
            raise
        try:
            architecture = check_available(path)
        except UnsupportedArchitectureError as other:
            raise UnsupportedArchitectureError(
                f"{error}; nor as a hooked model: {other}"
            ) from other
        on_progress(f"no native program for {architecture}: the transformers model is hooked", 1.0)
        return architecture
    return None


def _load_hooked(
    config: EngineConfig, path: Path, architecture: str, on_progress: OnProgress
) -> HookedModel:
    from flowprefill.hooks.loading import load_hooked

    device = make_device(config.device, config.max_slice_ms / 1000, config.num_threads)

    def kv_bytes(need: int) -> tuple[int, str]:
        if device.torch_device.type == "cuda":
            return kv_cache_bytes(config, need, *torch.cuda.mem_get_info(device.torch_device))
        return kv_cache_bytes(config, need, available_bytes())

    return load_hooked(config, path, architecture, device, kv_bytes, on_progress)
