"""CostModel: how long tasks take on a modelled device, and where they may be left. No torch.

The simulator runs on a CostModel and shows the scheduler a Predictor. They are the same object, or
the predictor is a NoisyPredictor over it.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from flowprefill.granularity import Granularity
from flowprefill.predictor.base import Predictor

Prompts = Sequence[tuple[int, int]]
"""Prompts of one task, each (num_tokens, num_cached_tokens); what is not cached is computed."""

_SAME_S = 1e-9
"""Times so close are one boundary: sums of floats differ in their last digits."""


@dataclass(frozen=True, slots=True)
class Part:
    """Slices of one operator group behind each other."""

    group: str
    start_s: float
    """From the start of the task."""
    end_s: float
    slice_s: float
    """Length of a slice; the last one may be shorter."""


class Timeline(Protocol):
    """Device time of one task, and its boundaries."""

    @property
    def total_s(self) -> float:
        """Device seconds of the whole task; its end is a boundary."""
        ...

    def next_boundary_s(self, elapsed_s: float) -> float:
        """The first boundary at or after `elapsed_s` seconds of device time."""
        ...


@runtime_checkable
class PartedTimeline(Timeline, Protocol):
    """A Timeline that can say what runs when."""

    def parts(self, from_s: float, to_s: float) -> Iterator[Part]:
        """What runs between two times of the task, in order."""
        ...


class CostModel(Predictor, Protocol):
    """A Predictor that knows the boundaries of a task too."""

    def timeline(self, prompts: Prompts, granularity: Granularity) -> Timeline:
        """A prefill of one or several prompts, packed."""
        ...

    def step_timeline(self, num_seqs: int, num_context_tokens: int) -> Timeline:
        """A decode step, see decode_step_s; its boundaries do not depend on granularity."""
        ...


@dataclass(frozen=True, slots=True)
class PassTimeline:
    """Boundaries behind each of a few passes: `whole` (one pass) and `chunk`."""

    ends_s: Sequence[float]
    """When each pass ends, ascending."""
    group: str = "pass"
    """What a pass is called."""

    @property
    def total_s(self) -> float:
        return self.ends_s[-1]

    def next_boundary_s(self, elapsed_s: float) -> float:
        index = bisect_left(self.ends_s, elapsed_s - _SAME_S)
        return self.ends_s[min(index, len(self.ends_s) - 1)]

    def parts(self, from_s: float, to_s: float) -> Iterator[Part]:
        """See PartedTimeline."""
        starts_s = [0.0, *self.ends_s]
        for start_s, end_s in itertools.pairwise(starts_s):
            yield from _clip(Part(self.group, start_s, end_s, end_s - start_s), from_s, to_s)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Slices of equal length one behind the other, the last one perhaps shorter."""

    end_s: float
    slice_s: float
    group: str = "layer"
    """Operators that run in them."""


class LayerTimeline:
    """One pass of equal layers, each a few stretches, and another last layer."""

    def __init__(
        self, layer: Sequence[Stretch], num_layers: int, last_layer: Sequence[Stretch]
    ) -> None:
        """num_layers: without the last one. end_s of a stretch counts from the layer's start."""
        self._layer = layer
        self._layer_s = layer[-1].end_s
        self._num_layers = num_layers
        self._last_layer = last_layer
        self.total_s = num_layers * self._layer_s + last_layer[-1].end_s

    def next_boundary_s(self, elapsed_s: float) -> float:
        index = min(math.floor(elapsed_s / self._layer_s), self._num_layers)
        layer_start_s = index * self._layer_s
        stretches = self._layer if index < self._num_layers else self._last_layer
        within_s = elapsed_s - layer_start_s - _SAME_S
        start_s = 0.0
        for stretch in stretches:
            if within_s <= stretch.end_s:
                num_slices = math.ceil((within_s - start_s) / stretch.slice_s)
                boundary_s = min(start_s + num_slices * stretch.slice_s, stretch.end_s)
                return layer_start_s + boundary_s
            start_s = stretch.end_s
        return self.total_s

    def parts(self, from_s: float, to_s: float) -> Iterator[Part]:
        """See PartedTimeline."""
        first = min(math.floor(from_s / self._layer_s), self._num_layers)
        for index in range(first, self._num_layers + 1):
            layer_start_s = index * self._layer_s
            if layer_start_s >= to_s:
                return
            start_s = 0.0
            for stretch in self._layer if index < self._num_layers else self._last_layer:
                part = Part(
                    stretch.group,
                    layer_start_s + start_s,
                    layer_start_s + stretch.end_s,
                    stretch.slice_s,
                )
                yield from _clip(part, from_s, to_s)
                start_s = stretch.end_s


def _clip(part: Part, from_s: float, to_s: float) -> Iterator[Part]:
    """What of it lies between the two times, if anything does."""
    start_s, end_s = max(part.start_s, from_s), min(part.end_s, to_s)
    if end_s - start_s > _SAME_S:
        yield Part(part.group, start_s, end_s, part.slice_s)


class NoisyPredictor:
    """A CostModel's predictions of prefills, each wrong by a factor of its own.

    The factor is uniform in [1 - error, 1 + error] and a function of the seed and the prompt's
    length: asked again, or in another run, the same prompt is mispredicted in the same way.
    Decode steps are predicted exactly.
    """

    def __init__(self, cost: CostModel, error: float, seed: int) -> None:
        if not 0 <= error < 1:
            raise ValueError(f"error {error}: must be in [0, 1)")
        self._cost = cost
        self._error = error
        self._seed = seed
        self._factors: dict[int, float] = {}
        self.speed_factor = cost.speed_factor
        self.saturation_tokens = cost.saturation_tokens

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        return self._cost.prefill_s(num_tokens, num_cached_tokens) * self._factor(num_tokens)

    def packed_prefill_s(self, prompts: Prompts) -> float:
        computed = [num_tokens - num_cached for num_tokens, num_cached in prompts]
        factors = [self._factor(num_tokens) for num_tokens, _ in prompts]
        mean = sum(n * f for n, f in zip(computed, factors, strict=True)) / sum(computed)
        return self._cost.packed_prefill_s(prompts) * mean

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        return self._cost.decode_step_s(num_seqs, num_context_tokens)

    def _factor(self, num_tokens: int) -> float:
        factor = self._factors.get(num_tokens)
        if factor is None:
            draw = random.Random(self._seed * 1_000_003 + num_tokens).uniform(-1, 1)
            factor = self._factors[num_tokens] = 1 + self._error * draw
        return factor
