"""Plan: which requests a replay sends, when, and what they are owed. Knows no text, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flowprefill.workload import PREFIX_BLOCK_TOKENS, Objective, TraceRequest, objective


@dataclass(frozen=True)
class PlannedRequest:
    """One request of a replay."""

    req_id: int
    """From 0, in the order of the trace."""
    due_s: float
    """When it is to be sent, seconds from the start of the replay."""
    input_tokens: int
    output_tokens: int
    """Exactly so many are generated."""
    objective: Objective
    prefix_hashes: tuple[int, ...] = ()
    """As in TraceRequest."""
    block_tokens: int = PREFIX_BLOCK_TOKENS
    """As in TraceRequest."""
    type: str = ""
    """As in TraceRequest."""


def plan_replay(
    requests: Sequence[TraceRequest], objectives: Sequence[Objective] | None = None
) -> list[PlannedRequest]:
    """The requests of a trace, which has been scaled and cut as wanted; the first is due at 0.

    objectives: of each request; None = workload.objective
    """
    objectives = objectives or [objective(request) for request in requests]
    first_s = requests[0].arrival_s if requests else 0.0
    return [
        PlannedRequest(
            req_id,
            request.arrival_s - first_s,
            request.input_tokens,
            request.output_tokens,
            goal,
            request.prefix_hashes,
            request.block_tokens,
            request.type,
        )
        for req_id, (request, goal) in enumerate(zip(requests, objectives, strict=True))
    ]
