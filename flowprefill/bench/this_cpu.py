"""The machine that this runs on as a platform of the simulator: its profile, taken or from disk."""

from __future__ import annotations

from flowprefill.clock import MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.engine import scheduler_options
from flowprefill.loading import OnProgress, load_model, profile_model
from flowprefill.simulator.profiled import DeviceTimes, ProfiledPlatform

NAME = "this CPU"


def this_cpu(config: EngineConfig, on_progress: OnProgress) -> ProfiledPlatform:
    """The model that `config` names, loaded and profiled. Raises ConfigError or ModelLoadError."""
    model = load_model(config, on_progress)
    profile = profile_model(model, MonotonicClock(), on_progress)
    num_tokens = model.cache.num_blocks * model.cache.block_size
    return ProfiledPlatform(
        device_name=NAME,
        model_name=config.model,
        times=DeviceTimes.from_profile(profile, model.spec.num_layers, model.program.limits),
        block_tokens=config.block_size,
        num_blocks=model.cache.num_blocks,
        max_tokens=min(model.spec.max_position_embeddings, num_tokens),
        # packs are bounded by the granularity, see ProfiledPlatform.options
        engine_options=scheduler_options(config, saturation_tokens=1),
    )
