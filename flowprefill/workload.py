"""Workloads: requests of a trace, and what may be done to them before they are replayed. No torch.

Knows neither engine nor model. Files are read by flowprefill.traces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowprefill.traces.files import read_trace
from flowprefill.traces.request import PREFIX_BLOCK_TOKENS, TraceError, TraceRequest

__all__ = [
    "PREFIX_BLOCK_TOKENS",
    "Objective",
    "TraceError",
    "TraceRequest",
    "clip_lengths",
    "objective",
    "read_trace",
    "scale_lengths",
    "scale_rate",
    "spread_ticks",
    "window",
]


@dataclass(frozen=True)
class Objective:
    """The SLO class of a request and its objectives."""

    name: str
    ttft_s: float
    tbt_s: float


BY_TYPE = {
    objective.name: objective
    for objective in (
        Objective("text", 0.25, 0.1),
        Objective("image", 0.5, 0.1),
        Objective("search", 4.0, 0.2),
        Objective("file", 6.0, 0.2),
    )
}
"""Objectives of the request types of QwenTrace: the FlowPrefill paper's for Llama3-8B on A800."""

BY_LENGTH = (
    (1024, Objective("short", 0.25, 0.1)),
    (2048, Objective("medium", 0.5, 0.1)),
    (16_384, Objective("long", 4.0, 0.2)),
)
"""Classes of requests whose type says nothing, by the longest prompt of each, with the same four
objectives. At some 10,000 prompt tokens per second the longest of a class takes about half of its
objective when it runs alone. Longer prompts are `document`."""

DOCUMENT_S_PER_TOKEN = 6.0 / 16_384
"""TTFT objective of a `document`, in proportion to its length: no fixed time suits both 20,000 and
120,000 tokens."""


def objective(request: TraceRequest, scale: float = 1.0) -> Objective:
    """The request's SLO class, its objectives times `scale`."""
    found = BY_TYPE.get(request.type) or _objective_by_length(request.input_tokens)
    return replace(found, ttft_s=found.ttft_s * scale, tbt_s=found.tbt_s * scale)


def _objective_by_length(num_tokens: int) -> Objective:
    for limit, found in BY_LENGTH:
        if num_tokens <= limit:
            return found
    return Objective("document", DOCUMENT_S_PER_TOKEN * num_tokens, 0.2)


def window(requests: Sequence[TraceRequest], start: int, num_requests: int) -> list[TraceRequest]:
    """`num_requests` consecutive requests from index `start`; the first one arrives at 0.

    Raises TraceError if there are not so many.
    """
    taken = requests[start : start + num_requests]
    if start < 0 or num_requests <= 0 or len(taken) < num_requests:
        raise TraceError(
            f"requests {start}..{start + num_requests} of a trace of {len(requests)} requests"
        )
    return [replace(r, arrival_s=r.arrival_s - taken[0].arrival_s) for r in taken]


def scale_rate(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """`scale` times as many requests per second: gaps are divided, lengths stay."""
    if not 0 < scale < math.inf:
        raise TraceError(f"rate scale {scale}: must be finite and > 0")
    return [replace(r, arrival_s=r.arrival_s / scale) for r in requests]


def spread_ticks(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Spread arrivals that were recorded in ticks evenly from each tick to the next.

    A recorder that rounds to seconds makes bursts that never were, and no change of the rate takes
    them apart. A trace counts as recorded so if two or more requests share an arrival on average;
    others stay as they are.
    """
    ticks = [list(group) for _, group in itertools.groupby(requests, key=lambda r: r.arrival_s)]
    if len(ticks) < 2 or len(requests) < 2 * len(ticks):
        return list(requests)
    starts_s = [tick[0].arrival_s for tick in ticks]
    starts_s.append(2 * starts_s[-1] - starts_s[-2])
    return [
        replace(request, arrival_s=start_s + (end_s - start_s) * index / len(tick))
        for tick, (start_s, end_s) in zip(ticks, itertools.pairwise(starts_s), strict=True)
        for index, request in enumerate(tick)
    ]


def scale_lengths(requests: Sequence[TraceRequest], scale: float) -> list[TraceRequest]:
    """Prompts and answers `scale` times as long, one token at least; shared prefixes as well."""
    if not 0 < scale < math.inf:
        raise TraceError(f"length scale {scale}: must be finite and > 0")
    return [_with_scaled_lengths(r, scale) for r in requests]


def _with_scaled_lengths(request: TraceRequest, scale: float) -> TraceRequest:
    input_tokens = max(1, round(request.input_tokens * scale))
    num_blocks = -(-input_tokens // request.block_tokens) if request.prefix_hashes else 0
    # A new block is equal where the old block that holds its last token is. Several new ones may
    # come from one old one; they need names of their own.
    names_per_hash = math.ceil(scale) + 1
    last = len(request.prefix_hashes) - 1
    hashes = tuple(
        request.prefix_hashes[min(last, math.ceil((block + 1) / scale) - 1)] * names_per_hash
        + block % names_per_hash
        for block in range(num_blocks)
    )
    output_tokens = max(1, round(request.output_tokens * scale))
    return replace(
        request, input_tokens=input_tokens, output_tokens=output_tokens, prefix_hashes=hashes
    )


def clip_lengths(
    requests: Sequence[TraceRequest], max_input_tokens: int, max_output_tokens: int
) -> list[TraceRequest]:
    """Cut what is longer; a prompt keeps its beginning."""
    if max_input_tokens <= 0 or max_output_tokens <= 0:
        raise TraceError(f"clip to {max_input_tokens},{max_output_tokens} tokens: must be > 0")
    return [
        replace(
            r,
            input_tokens=min(r.input_tokens, max_input_tokens),
            output_tokens=min(r.output_tokens, max_output_tokens),
            prefix_hashes=r.prefix_hashes[: -(-max_input_tokens // r.block_tokens)],
        )
        for r in requests
    ]
