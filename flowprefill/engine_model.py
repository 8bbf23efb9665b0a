"""Which kind of program runs a model: our own operators, or a hooked transformers model.

The latter, and transformers with it, is imported only where it is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowprefill.clock import Clock
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError, ModelLoadError, UnsupportedArchitectureError
from flowprefill.executor.device import make_device
from flowprefill.executor.device_choice import report_choice
from flowprefill.granularity import Granularity
from flowprefill.loading import (
    LoadedModel,
    kv_cache_bytes_on,
    load_model,
    profile_model,
)
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.programs.model_spec import read_model_spec, resolve_model_path
from flowprefill.programs.weights import OnProgress

if TYPE_CHECKING:
    from flowprefill.hooks.loading import HookedModel
    from flowprefill.parallel.ranks import Ranks


@dataclass(frozen=True)
class EngineModel:
    """All that an engine has of its model."""

    config: EngineConfig
    """What the engine runs by: where caches cannot be shared, without prefix caching."""
    model: LoadedModel | HookedModel
    predictor: FittedPredictor
    is_bit_invariant: bool
    ranks: Ranks | None = None
    """The others, if the model is divided; the engine closes them."""


@dataclass(frozen=True)
class _Hooked:
    """A model that is to be hooked."""

    architecture: str
    refusal: str | None = None
    """Why our own operators do not run it; None = they were not asked."""


def load_for_engine(config: EngineConfig, clock: Clock, on_progress: OnProgress) -> EngineModel:
    """Load and profile what model.json names. Raises as load_model does."""
    path = resolve_model_path(config.model)
    granularity = Granularity.parse(config.granularity)
    chosen = _choose_hooked(config, path, on_progress)
    if chosen:
        if config.tensor_parallel_size > 1:
            raise ConfigError(
                f"model.json: tensor_parallel_size={config.tensor_parallel_size}: must be 1 for a "
                f"hooked model, which {chosen.architecture} is"
            )
        hooked = _load_hooked(config, path, chosen, on_progress)
        profile = hooked.profile(clock, on_progress)
        report_choice(hooked.device.torch_device, hooked.spec.vocab_size, on_progress)
        predictor: FittedPredictor = hooked.predictor(profile, granularity)
        return EngineModel(hooked.config, hooked, predictor, profile.is_bit_invariant)
    model = load_model(config, on_progress)
    try:
        profile = profile_model(model, clock, on_progress)
        report_choice(model.device.torch_device, model.spec.vocab_size, on_progress)
        predictor = FittedPredictor.from_profile(
            profile, model.spec.num_layers, model.program.limits, granularity
        )
    except BaseException:
        if model.ranks:
            model.ranks.close()
        raise
    return EngineModel(config, model, predictor, profile.is_bit_invariant, model.ranks)


def _choose_hooked(config: EngineConfig, path: Path, on_progress: OnProgress) -> _Hooked | None:
    """None = our own operators run it, or say why they cannot. Raises UnsupportedArchitectureError
    if neither kind of program, or not the one asked for, can; ModelLoadError if keys are broken."""
    from flowprefill.hooks.availability import check_available

    if config.program == "hooks":
        return _Hooked(check_available(path))
    # transformers reads folders only
    refusal = _refusal(path, config.max_model_len) if path.is_dir() else None
    if config.program == "native" or refusal is None:
        return None
    try:
        architecture = check_available(path)
    except UnsupportedArchitectureError as error:
        problem = f"{refusal.reason}; nor as a hooked model: {error}"
        if not refusal.is_partial:
            raise UnsupportedArchitectureError(problem) from error
        on_progress(problem, 1.0)
        return None
    reason = f"no native program for {architecture}: {refusal.reason}"
    on_progress(f"{reason}; the transformers model is hooked", 1.0)
    return _Hooked(architecture, refusal.reason)


@dataclass(frozen=True)
class _Refusal:
    """Why our own operators do not run a model."""

    reason: str
    is_partial: bool = False
    """They do, as far as its attention window reaches."""


def _refusal(path: Path, max_model_len: int | None) -> _Refusal | None:
    """None = our own operators run it. Raises ModelLoadError if keys are missing or broken."""
    try:
        window = read_model_spec(path).sliding_window
    except UnsupportedArchitectureError as error:
        return _Refusal(str(error))
    if window is None or (max_model_len is not None and max_model_len <= window):
        return None
    reason = f"{path}: sliding_window={window}: our operators take no longer sequences"
    return _Refusal(reason, is_partial=max_model_len is None)


def _load_hooked(
    config: EngineConfig, path: Path, chosen: _Hooked, on_progress: OnProgress
) -> HookedModel:
    from flowprefill.hooks.loading import load_hooked

    device = make_device(config.device, config.max_slice_ms / 1000, config.num_threads)
    kv_bytes = partial(kv_cache_bytes_on, device.torch_device, config)
    try:
        return load_hooked(config, path, chosen.architecture, device, kv_bytes, on_progress)
    except ModelLoadError as error:
        if chosen.refusal is None:
            raise
        raise ModelLoadError(f"{chosen.refusal}; nor as a hooked model: {error}") from error
