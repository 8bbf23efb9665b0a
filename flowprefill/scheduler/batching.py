"""SLO-aware batching: which waiting prompts can join a short one without costing it its objective.

One pass over a few short prompts costs little more than over one, as long as the pass is below the
device's saturation point. Nobody loses blocks for a joiner. FlowPrefill, arXiv 2602.16603, where
the chosen request keeps at least 10% of its objective as slack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice

from flowprefill.scheduler.policy import slack_s
from flowprefill.scheduler.tracked import Tracked

MIN_SLACK_SHARE = 0.1
"""Share of its TTFT objective that the chosen request keeps as slack."""
MAX_LOOKED_AT = 64
"""Waiting requests that are considered, the most urgent first: bounds the time of a decision."""


def joiners(
    chosen: Tracked,
    waiting: Iterable[Tracked],
    *,
    max_tokens: int,
    max_requests: int,
    now_s: float,
    reserve: Callable[[Tracked], bool],
) -> list[Tracked]:
    """Requests to pack with `chosen`, which has its blocks already.

    waiting: in the order of urgency; `chosen` is not among them. While `chosen` can be on time,
    only those that can be so too join it.
    max_tokens: tokens of the pass at most; reserve(request): gives it its blocks, if there is room
    """
    tokens = chosen.num_input_tokens - chosen.num_cached_tokens
    pass_s = chosen.remaining_s
    latest_end_s = _latest_end_s(chosen, now_s)
    joined: list[Tracked] = []
    in_time = (r for r in waiting if latest_end_s == math.inf or slack_s(r, now_s) >= 0)
    for request in islice(in_time, MAX_LOOKED_AT):
        if tokens >= max_tokens or len(joined) + 1 >= max_requests:
            break
        tokens_with = tokens + request.num_input_tokens
        # Alone one after the other they would take this time; packed they take no longer.
        pass_with_s = pass_s + request.remaining_s
        is_in_time = now_s + pass_with_s <= latest_end_s
        if tokens_with <= max_tokens and is_in_time and reserve(request):
            joined.append(request)
            tokens, pass_s = tokens_with, pass_with_s
    return joined


def _latest_end_s(chosen: Tracked, now_s: float) -> float:
    """End of the pass that leaves `chosen` its slack; infinite if it will be late anyway, or is a
    resumed stream, which cannot be."""
    if chosen.deadline_s == math.inf or chosen.deadline_s < now_s + chosen.remaining_s:
        return math.inf
    return chosen.deadline_s - MIN_SLACK_SHARE * (chosen.deadline_s - chosen.arrival_s)
