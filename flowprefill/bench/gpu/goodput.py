"""The last stage of `bench gpu-bench`: policies and chunks side by side on a stretch of a trace.

Two minutes of the trace are compressed until prompts arrive as fast as the device prefills them one
by one, with the paper's objectives as tight for this device as they are for its own. Each cell sees
the same arrivals; idle time is cut out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowprefill.bench.engine_replay import EngineReplayer
from flowprefill.bench.goodput_outcomes import (
    Outcome,
    attainment,
    check_served,
    outcome_of,
    send_lag_p99_s,
)
from flowprefill.bench.goodput_outcomes import worst_class_attainment as worst_class
from flowprefill.bench.goodput_runs import Cell, with_cell
from flowprefill.bench.gpu.random_model import RandomModel
from flowprefill.bench.gpu.stages import Budget
from flowprefill.bench.progress import BenchProgress
from flowprefill.bench.simulate_plan import measured_plan, take_window
from flowprefill.bench.this_cpu import platform_of
from flowprefill.engine import Engine
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile
from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.replay.records import send_lag_figures
from flowprefill.simulator.platform import Platform
from flowprefill.simulator.replay import at_load
from flowprefill.workload import TraceRequest, clip_lengths, read_trace, scale_lengths

WINDOW_S = 120.0
"""Of the trace, as recorded."""
LOAD = 1.0
"""Prefill seconds that arrive per second."""
OUTPUT_TOKENS = 1


@dataclass(frozen=True)
class TraceSizes:
    """How much of the trace, and what is compared on it."""

    cells: tuple[str, ...]
    """policy/granularity."""
    length_scale: float
    """Prompts are so many times as long."""
    max_requests: int
    min_requests: int
    """Fewer would be served after the last arrival, waiting for nobody."""


def measure_goodput(
    random_model: RandomModel,
    trace: Path,
    sizes: TraceSizes,
    seed: int,
    progress: BenchProgress,
    budget: Budget,
) -> dict[str, Any]:
    """Figures of each cell, by its name, and what they were measured on."""
    config, model = random_model.config, random_model.model
    name = str(model.device.torch_device)
    platform = platform_of(config, model, random_model.profile, name)
    num_requests = _num_requests(trace, platform, sizes, budget)
    if num_requests < sizes.min_requests:
        budget.cut(f"goodput: time for {num_requests} requests is too little")
        return {}
    planned = _plan(platform, trace, num_requests, sizes.length_scale)
    span_s = planned[-1].due_s
    cells: dict[str, Any] = {}
    for cell in map(Cell.parse, sizes.cells):
        if not budget.allows(f"goodput of {cell.name}", span_s):
            continue
        progress.describe(f"goodput of {cell.name}")
        cells[cell.name] = _measure_cell(random_model, cell, planned, seed, progress)
    facts = {
        "trace": trace.name,
        "num_requests": num_requests,
        "load": LOAD,
        "offered_per_s": round(num_requests / span_s, 3),
        "length_scale": sizes.length_scale,
    }
    return {"cells": cells, **facts}


def _num_requests(trace: Path, platform: Platform, sizes: TraceSizes, budget: Budget) -> int:
    """Those of two minutes, or as many as there is time for."""
    recorded = read_trace(trace)
    first_s = recorded[0].arrival_s
    window = [r for r in recorded if r.arrival_s - first_s <= WINDOW_S][: sizes.max_requests]
    cost = platform.cost(Granularity("tile"))
    lengths = [r.input_tokens for r in _as_run(window, platform, sizes.length_scale)]
    allowed_s = budget.left_s / len(sizes.cells) * LOAD
    work_s = 0.0
    for count, num_tokens in enumerate(lengths):
        work_s += cost.prefill_s(num_tokens)
        if work_s > allowed_s:
            budget.cut(f"goodput: {count} of {len(lengths)} requests of the trace")
            return count
    return len(lengths)


def _as_run(
    requests: Sequence[TraceRequest], platform: Platform, length_scale: float
) -> list[TraceRequest]:
    room = platform.max_tokens - OUTPUT_TOKENS
    return clip_lengths(scale_lengths(requests, length_scale), room, OUTPUT_TOKENS)


def _plan(
    platform: Platform, trace: Path, num_requests: int, length_scale: float
) -> list[PlannedRequest]:
    options = measured_plan(platform, trace, num_requests, OUTPUT_TOKENS, length_scale, LOAD)
    window = take_window(options, trace, 0)
    return plan_replay(at_load(window.requests, LOAD, platform), window.objectives)


def _measure_cell(
    random_model: RandomModel,
    cell: Cell,
    planned: Sequence[PlannedRequest],
    seed: int,
    progress: BenchProgress,
) -> dict[str, Any]:
    """Replay on an engine of its own. Raises BenchmarkError if a request fails."""
    replayer = EngineReplayer(seed)
    config = with_cell(random_model.config, cell)
    load = random_model.for_engine
    engine = Engine(config, replayer.on_output, progress.show_loading, load)
    with contextlib.closing(engine):
        records = replayer.run(engine, planned, cut_idle=True)
    check_served(cell.name, records)
    blocking_s = [r.blocking_s for r in records if r.blocking_s is not None]
    return summarise(outcome_of(records), blocking_s, planned[-1].due_s)


def summarise(outcome: Outcome, blocking_s: Sequence[float], span_s: float) -> dict[str, Any]:
    """goodput_per_s: requests on time per second of arrivals."""
    ttft_s = [s for values in outcome.ttft_by_class.values() for s in values]
    return {
        "attainment": round(attainment([outcome]), 4),
        "worst_class_attainment": round(worst_class([outcome]), 4),
        "goodput_per_s": round(outcome.num_on_time / span_s, 3),
        "ttft_p50_ms": round(1000 * percentile(ttft_s, 50), 2),
        "ttft_p99_ms": round(1000 * percentile(ttft_s, 99), 2),
        "blocking_p99_ms": round(1000 * percentile(blocking_s, 99), 3) if blocking_s else None,
        **send_lag_figures(send_lag_p99_s([outcome])),
    }
