"""ProfiledCost: task times and boundaries of a device that was profiled, and the platform of it.

Times are those that the engine's predictor gives for the profile's slices, boundaries those of the
engine's own plans (programs/slices.py). Beyond the predictor, which speaks of slices, a prefill
takes the choice of its tokens at the end, and what the engine needs around it (`overhead_s`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

from flowprefill.granularity import Granularity
from flowprefill.predictor.features import FEATURE_NAMES
from flowprefill.predictor.fitted import FittedPredictor, fit, fit_choice
from flowprefill.predictor.profile import Profile
from flowprefill.programs.slices import (
    Group,
    PassPlan,
    Slice,
    SliceLimits,
    Span,
    plan_decode,
    plan_prefill,
)
from flowprefill.scheduler.scheduler import SchedulerOptions
from flowprefill.simulator.cost import Prompts, Timeline

_SAME_S = 1e-9
_CACHED_TIMELINES = 1 << 13


@dataclass(frozen=True)
class DeviceTimes:
    """What is known of one model on one device."""

    coefficients: tuple[tuple[str, tuple[float, ...]], ...]
    """Seconds per feature of a slice, by slice kind."""
    choice: tuple[float, float]
    """Seconds of the choice of tokens, constant and per row."""
    num_layers: int
    limits: SliceLimits
    overhead_s: float = 0.0
    """Of each prefill, beside its slices and the choice of its tokens."""

    @staticmethod
    def from_profile(profile: Profile, num_layers: int, limits: SliceLimits) -> DeviceTimes:
        """What the profile showed."""
        coefficients = fit(profile.samples, limits.key_tiles)
        choice = fit_choice(profile.choices)
        return DeviceTimes(tuple(sorted(coefficients.items())), choice, num_layers, limits)

    def slowed(self, factor: float, overhead_s: float) -> DeviceTimes:
        """Slices and choices take `factor` times as long, and prefills so much more."""
        coefficients = tuple((k, tuple(factor * v for v in vs)) for k, vs in self.coefficients)
        choice = factor * self.choice[0], factor * self.choice[1]
        return replace(self, coefficients=coefficients, choice=choice, overhead_s=overhead_s)


class ProfiledCost:
    """Implements CostModel. As a Predictor it is the engine's own, at speed factor 1."""

    speed_factor = 1.0

    def __init__(self, times: DeviceTimes, granularity: Granularity) -> None:
        self._times = times
        self._predictor = FittedPredictor(
            dict(times.coefficients), times.num_layers, times.limits, granularity, times.choice
        )
        self.saturation_tokens = self._predictor.saturation_tokens
        self.prefill_s = self._predictor.prefill_s
        self.packed_prefill_s = self._predictor.packed_prefill_s
        self.decode_step_s = self._predictor.decode_step_s
        self._timeline = lru_cache(maxsize=_CACHED_TIMELINES)(self._compute_timeline)

    def least_prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """See LeastCost: what rows and keys cost where all else is shared or saved.

        Of products the cheapest time per row of any slice; of attention what each row pays for
        itself and for the keys that it sees; of what a pass pays once, a prompt's share of the
        tokens of the longest pack.
        """
        times, num_rows = self._times, num_tokens - num_cached_tokens
        attention, head = self._named("attention"), self._named("head")
        # each row sees itself and all before it; tiles of keys make it more
        row_keys = (num_tokens * (num_tokens + 1) - num_cached_tokens * (num_cached_tokens + 1)) / 2
        attention_s = attention["row"] * num_rows + attention["row x key"] * row_keys
        once_s = head[""] + times.choice[0] + times.overhead_s
        return (
            num_rows * self._least_products_s
            + (times.num_layers - 1) * attention_s
            + min(1.0, num_rows / self.saturation_tokens) * once_s
            + head["key"] * num_tokens
            + times.choice[1]
        )

    @cached_property
    def _least_products_s(self) -> float:
        """Of one row in all layers; the last one's MLP is the head's."""
        cost, num_layers = self._predictor.profiled_s, self._times.num_layers
        widths = range(1, self._times.limits.tile_rows + 1)
        qkv_s = min(cost(Slice(Group.QKV, 0, n)) / n for n in widths)
        mlp_s = min(cost(Slice(Group.MLP, 0, n)) / n for n in widths)
        return num_layers * qkv_s + (num_layers - 1) * mlp_s

    def _named(self, kind: str) -> dict[str, float]:
        """Seconds per feature of a kind of slice."""
        return dict(zip(FEATURE_NAMES[kind], dict(self._times.coefficients)[kind], strict=True))

    def timeline(self, prompts: Prompts, granularity: Granularity) -> Timeline:
        """See CostModel. Chunks are passes of one prompt; packed prompts are one pass."""
        return self._timeline(tuple(prompts), granularity)

    def step_timeline(self, num_seqs: int, num_context_tokens: int) -> Timeline:
        """See CostModel; sequences are taken to be of equal length. Left after any slice."""
        total_s = self._predictor.decode_step_s(num_seqs, num_context_tokens)
        context = num_context_tokens // num_seqs

        def plans() -> Iterable[PassPlan]:
            limits, num_layers = self._times.limits, self._times.num_layers
            return [plan_decode([context] * num_seqs, limits, num_layers)]

        return PlannedTimeline(total_s, plans, self._predictor.profiled_s, self._times.num_layers)

    def _compute_timeline(self, prompts: Prompts, granularity: Granularity) -> Timeline:
        times = self._times
        passes = [list(prompts)]
        if granularity.kind == "chunk" and len(prompts) == 1:
            passes = [[chunk] for chunk in granularity.chunks(*prompts[0])]

        def plans() -> Iterable[PassPlan]:
            for members in passes:
                spans = [Span(start, end) for end, start in members]
                is_final = members is passes[-1]
                yield plan_prefill(spans, times.limits, granularity, is_final)

        choice_s = times.choice[0] + times.choice[1] * len(prompts)
        total_s = self.packed_prefill_s(prompts) + choice_s + times.overhead_s
        return PlannedTimeline(total_s, plans, self._predictor.profiled_s, times.num_layers)


class PlannedTimeline:
    """Boundaries of a task that consists of planned passes. They are worked out when first asked
    for: most tasks run undisturbed."""

    def __init__(
        self,
        total_s: float,
        plans: Callable[[], Iterable[PassPlan]],
        cost: Callable[[Slice], float],
        num_layers: int,
    ) -> None:
        """total_s: of the task; may exceed its slices, and its end is not left before all of it."""
        self.total_s = total_s
        self._plans = plans
        self._cost = cost
        self._num_layers = num_layers
        self._passes: list[_PassBoundaries] = []
        self._ends_s: list[float] = []

    def next_boundary_s(self, elapsed_s: float) -> float:
        if not self._passes:
            self._passes = [_PassBoundaries(p, self._cost, self._num_layers) for p in self._plans()]
            self._ends_s = list(itertools.accumulate(p.total_s for p in self._passes))
        at_s = elapsed_s - _SAME_S
        index = bisect_left(self._ends_s, at_s)
        if index == len(self._passes):
            return self.total_s
        start_s = self._ends_s[index - 1] if index else 0.0
        boundary_s = start_s + self._passes[index].next_s(at_s - start_s)
        if index < len(self._passes) - 1:
            boundary_s = min(boundary_s, self._ends_s[index])  # between two chunks
        elif boundary_s > self._ends_s[index] - _SAME_S:
            return self.total_s  # behind the last slice it is done
        return min(boundary_s, self.total_s)


class _PassBoundaries:
    """Where one pass may be left, in seconds from its start."""

    def __init__(self, plan: PassPlan, cost: Callable[[Slice], float], num_layers: int) -> None:
        self._layer = _boundaries(plan.layer, cost)
        self._last = _boundaries(plan.last_layer, cost)
        self._layer_s = sum(map(cost, plan.layer))
        self._num_before = plan.num_groups(num_layers) - 1
        self._before_s = self._num_before * self._layer_s
        self.total_s = self._before_s + sum(map(cost, plan.last_layer))

    def next_s(self, at_s: float) -> float:
        """The first boundary at or behind at_s; infinite if there is none."""
        if self._layer and self._layer_s and at_s <= self._before_s:
            layer = max(0, math.floor(at_s / self._layer_s))
            for index in (layer, layer + 1):
                found = bisect_left(self._layer, at_s - index * self._layer_s)
                if index < self._num_before and found < len(self._layer):
                    return index * self._layer_s + self._layer[found]
        found = bisect_left(self._last, at_s - self._before_s)
        return self._before_s + self._last[found] if found < len(self._last) else math.inf


def _boundaries(slices: Sequence[Slice], cost: Callable[[Slice], float]) -> list[float]:
    """Ends of the slices behind which a task may be left."""
    ends_s = itertools.accumulate(map(cost, slices))
    return [end_s for end_s, piece in zip(ends_s, slices, strict=True) if piece.is_boundary]


@dataclass(frozen=True)
class ProfiledPlatform:
    """Implements Platform: one model on one device, as its engine would run it."""

    device_name: str
    model_name: str
    times: DeviceTimes
    block_tokens: int
    num_blocks: int
    max_tokens: int
    engine_options: SchedulerOptions
    """As model.json has them; max_pack_tokens is the granularity's."""

    def cost(self, granularity: Granularity) -> ProfiledCost:
        return _profiled(self.times, granularity)

    def options(self, granularity: Granularity) -> SchedulerOptions:
        max_pack_tokens = granularity.pack_tokens(self.cost(granularity).saturation_tokens)
        return replace(self.engine_options, max_pack_tokens=max_pack_tokens)


@cache
def _profiled(times: DeviceTimes, granularity: Granularity) -> ProfiledCost:
    """One for all simulations of a process: it remembers the prompts that it has seen."""
    return ProfiledCost(times, granularity)
