"""From a trace file to a plan: which part of it, and how it is scaled and cut."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.traces.files import load_trace
from flowprefill.workload import (
    TraceRequest,
    clip_lengths,
    objective,
    scale_lengths,
    scale_rate,
    spread_ticks,
    window,
)


@dataclasses.dataclass(frozen=True)
class TraceOptions:
    """What is made of a trace."""

    trace: Path
    start: int = 0
    """First request, from 0."""
    requests: int | None = None
    """How many; None = all from there."""
    rate_scale: float = 1.0
    """So many times as many requests per second."""
    length_scale: float = 1.0
    """Prompts and answers so many times as long."""
    slo_scale: float = 1.0
    """Times all objectives."""
    max_input_tokens: int | None = None
    """Longer prompts are cut, after scaling; None = none is."""
    max_output_tokens: int | None = None
    """Longer answers are cut, after scaling; None = none is."""
    output_tokens: int | None = None
    """Tokens of every answer; None = as in the trace."""
    spread_ticks: bool = False
    """Arrivals that were recorded in ticks are spread over each tick."""
    new_tokens_only: bool = False
    """See traces.formats.qwen_parser."""


@dataclasses.dataclass(frozen=True)
class TracePlan:
    """A plan, and what was left out of it."""

    requests: list[PlannedRequest]
    num_dropped: int
    """Failed requests of the whole trace."""


def read_plan(options: TraceOptions) -> TracePlan:
    """Read the trace and make the plan. Raises TraceError.

    Classes and objectives are those of the requests as they were recorded: a prompt that is
    shortened for a small machine keeps its class.
    """
    trace = load_trace(options.trace, options.new_tokens_only)
    requests = spread_ticks(trace.requests) if options.spread_ticks else trace.requests
    # One at least: a window of none is an error that names the trace's length.
    num_requests = options.requests or max(1, len(requests) - options.start)
    recorded = window(requests, options.start, num_requests)
    goals = [objective(request, options.slo_scale) for request in recorded]
    scaled = _with_lengths(scale_rate(recorded, options.rate_scale), options)
    return TracePlan(plan_replay(scaled, goals), trace.num_dropped)


def _with_lengths(requests: Sequence[TraceRequest], options: TraceOptions) -> list[TraceRequest]:
    if options.length_scale != 1.0:
        requests = scale_lengths(requests, options.length_scale)
    clipped = clip_lengths(
        requests, options.max_input_tokens or sys.maxsize, options.max_output_tokens or sys.maxsize
    )
    if options.output_tokens is None:
        return clipped
    return [dataclasses.replace(r, output_tokens=options.output_tokens) for r in clipped]
