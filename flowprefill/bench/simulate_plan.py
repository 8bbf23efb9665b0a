"""What `flowprefill simulate` runs: cells on windows of traces, and the machine they run on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flowprefill.bench.objectives import class_scales, scaled_objectives
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.simulator.data_sheets import DEVICES, MODELS, ModelSheet
from flowprefill.simulator.platform import PAPER_PLATFORM, GpuPlatform, Platform
from flowprefill.workload import (
    Objective,
    TraceRequest,
    clip_lengths,
    read_trace,
    scale_lengths,
    spread_ticks,
    window,
)

THIS_CPU = "this-cpu"
"""The device that is profiled, not read from a data sheet."""


@dataclass(frozen=True)
class Plan:
    """What is compared on what."""

    traces: tuple[Path, ...]
    policies: tuple[str, ...]
    granularities: tuple[str, ...]
    num_seeds: int
    num_requests: int
    """Of a window."""
    error: float
    max_output_tokens: int
    load: float
    platform: Platform = PAPER_PLATFORM
    model: ModelSheet | None = PAPER_PLATFORM.model
    """Whose objectives count; None: the paper's, as tight for this platform (objectives.py)."""
    length_scale: float = 1.0
    """Prompts are so many times as long."""
    slo_scale: float = 1.0
    """Times the TTFT objectives of this platform; without effect where the model has its own."""
    seed: int = 0
    """Of prediction errors, routers, and prompts of a comparison with the engine."""

    def error_seed(self, window: int) -> int:
        """Of the prediction errors in one of the num_seeds windows."""
        return self.seed * self.num_seeds + window

    def cells(self) -> list[Cell]:
        return [
            Cell(path, seed, policy, kind)
            for path in self.traces
            for seed in range(self.num_seeds)
            for kind in self.granularities
            for policy in self.policies
        ]


def measured_plan(
    platform: Platform,
    trace: Path,
    num_requests: int,
    num_output_tokens: int,
    length_scale: float,
    load: float = 1.0,
    slo_scale: float = 1.0,
) -> Plan:
    """One window of one trace, as it is run on the device that `platform` is the profile of: its
    prompts' times are known, and the paper's objectives are made as tight for it."""
    return Plan(
        traces=(trace,),
        policies=(),
        granularities=(),
        num_seeds=1,
        num_requests=num_requests,
        error=0.0,
        max_output_tokens=num_output_tokens,
        load=load,
        platform=platform,
        model=None,
        length_scale=length_scale,
        slo_scale=slo_scale,
    )


@dataclass(frozen=True)
class Cell:
    """One policy at one granularity on one window."""

    trace: Path
    seed: int
    policy: str
    granularity: str


@dataclass(frozen=True)
class Window:
    """Consecutive requests of a trace, prompts as long as they are run."""

    requests: list[TraceRequest]
    objectives: list[Objective]


@lru_cache(maxsize=4)
def take_window(plan: Plan, path: Path, seed: int) -> Window:
    """Windows start at even distances from the trace's beginning to its end."""
    trace = read_trace(path)
    last_start = len(trace) - plan.num_requests
    start = seed * last_start // max(plan.num_seeds - 1, 1)
    return make_window(plan, trace, window(trace, start, plan.num_requests))


def make_window(plan: Plan, trace: list[TraceRequest], requests: list[TraceRequest]) -> Window:
    """Requests of the trace as they are run, with their objectives, which go by their lengths in
    the trace. Raises ConfigError if their answers leave no room for a prompt."""
    room = plan.platform.max_tokens - plan.max_output_tokens
    if room < 1:
        raise ConfigError(
            f"--output-tokens {plan.max_output_tokens}: with one of the prompt the model takes "
            f"{plan.platform.max_tokens} tokens"
        )
    objectives = _objectives(plan, trace, requests)
    if plan.length_scale != 1.0:
        requests = scale_lengths(requests, plan.length_scale)
    return Window(clip_lengths(requests, room, plan.max_output_tokens), objectives)


def _objectives(
    plan: Plan, trace: list[TraceRequest], requests: list[TraceRequest]
) -> list[Objective]:
    if plan.model is not None:
        return [plan.model.objective(request) for request in requests]
    solo_s = plan.platform.cost(Granularity("tile")).prefill_s
    scales = class_scales(spread_ticks(trace), plan.length_scale, solo_s)
    return scaled_objectives(requests, scales, plan.slo_scale)


def gpu_platform(device: str, model: str, tensor_parallel: int | None) -> GpuPlatform:
    """By the names of data_sheets.py. Raises ConfigError for others, or a model that has no room.

    tensor_parallel: None = the model's usual number of devices
    """
    if device not in DEVICES:
        names = ", ".join((*DEVICES, THIS_CPU))
        raise ConfigError(f"--device {device}: must be one of {names}")
    if model not in MODELS:
        raise ConfigError(f"--model {model}: must be one of {', '.join(MODELS)}")
    sheet = MODELS[model]
    return GpuPlatform(DEVICES[device], sheet, tensor_parallel or sheet.tensor_parallel)
