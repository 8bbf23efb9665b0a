"""The machine that this runs on as a platform of the simulator: its profile, taken or from disk."""

from __future__ import annotations

from flowprefill.bench.pace import PROMPT_TOKENS, Pace, measure_pace
from flowprefill.clock import MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.engine import scheduler_options
from flowprefill.granularity import Granularity
from flowprefill.loading import LoadedModel, load_model, profile_model
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.predictor.profile import Profile
from flowprefill.programs.weights import OnProgress
from flowprefill.simulator.profiled import DeviceTimes, ProfiledPlatform

NAME = "this CPU"


def this_cpu(config: EngineConfig, on_progress: OnProgress) -> ProfiledPlatform:
    """The model that `config` names, loaded and profiled. Raises ConfigError or ModelLoadError."""
    return _load(config, on_progress)[0]


def paced_cpu(config: EngineConfig, on_progress: OnProgress) -> tuple[ProfiledPlatform, Pace]:
    """The same, and what tells how fast it is at the moment."""
    platform, model, profile = _load(config, on_progress)
    predictor = FittedPredictor.from_profile(
        profile, model.spec.num_layers, model.program.limits, Granularity("tile")
    )
    prefill_s = platform.cost(Granularity("tile")).prefill_s(PROMPT_TOKENS)
    on_progress("comparing the machine's speed with its profile's", 0.0)
    return platform, measure_pace(model, predictor, prefill_s)


def _load(
    config: EngineConfig, on_progress: OnProgress
) -> tuple[ProfiledPlatform, LoadedModel, Profile]:
    model = load_model(config, on_progress)
    profile = profile_model(model, MonotonicClock(), on_progress)
    return platform_of(config, model, profile, NAME), model, profile


def platform_of(
    config: EngineConfig, model: LoadedModel, profile: Profile, device_name: str
) -> ProfiledPlatform:
    """The platform that a profiled model is."""
    num_tokens = model.cache.num_blocks * model.cache.block_size
    return ProfiledPlatform(
        device_name=device_name,
        model_name=config.model,
        times=DeviceTimes.from_profile(profile, model.spec.num_layers, model.program.limits),
        block_tokens=config.block_size,
        num_blocks=model.cache.num_blocks,
        max_tokens=min(model.spec.max_position_embeddings, num_tokens),
        # packs are bounded by the granularity, see ProfiledPlatform.options
        engine_options=scheduler_options(config, saturation_tokens=1),
    )
