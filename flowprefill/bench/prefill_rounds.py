"""The measuring part of `flowprefill bench prefill`: rounds in which all ways to prefill alternate.

One round prefills one prompt per way, each way with the same token ids; so the machine's drift hits
all alike, and ratios are taken within a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

Prefill = Callable[[int], float]
"""Prefills a prompt drawn from the given seed; returns its seconds."""

MIN_ROUNDS = 3


@dataclass
class Rounds:
    """Seconds of each way at one length, one value for each round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        return len(next(iter(self.seconds.values())))

    def median_s(self, way: str) -> float:
        return median(self.seconds[way])

    def ratios(self, way: str, base: str) -> list[float]:
        """Throughput of `way` over that of `base`, round by round."""
        pairs = zip(self.seconds[base], self.seconds[way], strict=True)
        return [base_s / way_s for base_s, way_s in pairs]

    def faster(self, *ways: str) -> str:
        """That with the smaller median: the choice of each round's would favour lucky rounds."""
        return min(ways, key=self.median_s)


def run_rounds(
    ways: Mapping[str, Prefill],
    max_rounds: int,
    budget_s: float,
    seed: int,
    on_round: Callable[[], None],
) -> Rounds:
    """A round that does not count, then rounds until max_rounds or, from the third on, budget_s."""
    for prefill in ways.values():
        prefill(seed)
    rounds = Rounds({name: [] for name in ways})
    end_s = time.monotonic() + budget_s
    for index in range(max_rounds):
        if index >= MIN_ROUNDS and time.monotonic() >= end_s:
            break
        for name in order(list(ways), index):
            rounds.seconds[name].append(ways[name](seed + 1 + index))
        on_round()
    return rounds


def order(names: list[str], index: int) -> list[str]:
    """Each way comes first, and behind each other one, about equally often."""
    shift = index // 2 % len(names)
    turned = names[shift:] + names[:shift]
    return turned if index % 2 == 0 else turned[::-1]
