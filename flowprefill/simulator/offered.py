"""What a cluster is offered: the requests of a trace with their objectives, as often as wanted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flowprefill.workload import Objective, TraceRequest


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """A request of a trace, and what it is owed."""

    request: TraceRequest
    objective: Objective


def repeat(
    requests: Sequence[TraceRequest], objectives: Sequence[Objective], num_requests: int
) -> Iterator[OfferedRequest]:
    """So many requests, the given ones over and over; made one by one.

    Rounds follow each other at the mean gap. Prompts share prefixes within a round only, as another
    day's users would.
    """
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    round_s = span_s * len(requests) / max(1, len(requests) - 1)
    num_hashes = 1 + max((h for r in requests for h in r.prefix_hashes), default=0)
    pairs = list(zip(requests, objectives, strict=True))
    for index in range(num_requests):
        num_rounds, position = divmod(index, len(pairs))
        request, goal = pairs[position]
        hashes = request.prefix_hashes
        request = replace(
            request,
            arrival_s=request.arrival_s + num_rounds * round_s,
            prefix_hashes=tuple(h + num_rounds * num_hashes for h in hashes) if hashes else (),
        )
        yield OfferedRequest(request, goal)
