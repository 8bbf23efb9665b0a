"""Least work: the device time that a request takes at least, whatever the schedule.

What the offline bound (bound.py) is made of. A request costs least with

- as much of its prompt in the cache as can be: every leading block that another request has too,
  one that arrives before this one must have its first token;
- its prompt cut, or packed with others, in the cheapest way that the device's cost model knows;
  of a pack it bears its share (LeastCost).

Tokens behind the first one are left out: they may wait until all prefills are done.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from flowprefill.granularity import Granularity
from flowprefill.scheduler.events import Arrival
from flowprefill.simulator.bound import on_time_bound
from flowprefill.simulator.platform import Platform


@runtime_checkable
class LeastCost(Protocol):
    """A cost model that knows the least that a prompt can cost."""

    def least_prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Device seconds that a prompt adds at least, alone or packed, at any granularity."""
        ...


def offline_bound(
    arrivals: Sequence[Arrival], cost: LeastCost, block_tokens: int, num_devices: int = 1
) -> int:
    """How many of the requests any schedule can give their first token in time, at most.

    block_tokens: of a KV block, as in Arrival.prefix_keys
    """
    work_s = [
        cost.least_prefill_s(arrival.num_prompt_tokens, num_cached)
        for arrival, num_cached in zip(
            arrivals, most_cached_tokens(arrivals, block_tokens), strict=True
        )
    ]
    deadlines_s = [a.arrival_s + a.ttft_slo_s for a in arrivals]
    arrivals_s = [a.arrival_s for a in arrivals]
    return int(on_time_bound(arrivals_s, deadlines_s, work_s, num_devices=num_devices))


def offline_bound_on(platform: Platform, arrivals: Sequence[Arrival]) -> int | None:
    """The same on a platform; None if its cost model does not know the least a prompt can cost."""
    cost = platform.cost(Granularity("whole"))
    if not isinstance(cost, LeastCost):
        return None
    return offline_bound(arrivals, cost, platform.block_tokens)


def most_cached_tokens(arrivals: Sequence[Arrival], block_tokens: int) -> list[int]:
    """Leading tokens of each prompt that others can have left in the cache by its deadline."""
    first, second = _first_holders(arrivals)

    def is_held(key: Hashable, index: int) -> bool:
        holder = first[key] if first[key] != index else second.get(key)
        held_s = math.inf if holder is None else arrivals[holder].arrival_s
        return held_s < arrivals[index].arrival_s + arrivals[index].ttft_slo_s

    found = []
    for index, arrival in enumerate(arrivals):
        # The last token is always computed.
        keys = arrival.prefix_keys[: (arrival.num_prompt_tokens - 1) // block_tokens]
        num_held = next((i for i, key in enumerate(keys) if not is_held(key, index)), len(keys))
        found.append(num_held * block_tokens)
    return found


def _first_holders(
    arrivals: Sequence[Arrival],
) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
    """The first and the second request to arrive with each full block, by index."""
    first: dict[Hashable, int] = {}
    second: dict[Hashable, int] = {}
    for index in sorted(range(len(arrivals)), key=lambda i: arrivals[i].arrival_s):
        for key in arrivals[index].prefix_keys:
            if first.setdefault(key, index) != index:
                second.setdefault(key, index)
    return first, second
