"""Objectives on another device: the paper's, as tight for its users as they are on its own device.

A class's TTFT objective is the paper's, times how much slower (or quicker) this device prefills the
class's median prompt, alone, than the A800 of the paper does. So is the ratio of objective to solo
TTFT the paper's. TBT objectives stay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

from flowprefill.granularity import Granularity
from flowprefill.simulator.roofline import RooflineCost
from flowprefill.workload import Objective, TraceRequest, objective

SoloSeconds = Callable[[int], float]
"""TTFT of a prompt of so many tokens that has the device alone."""


@dataclass(frozen=True)
class ClassScale:
    """How one class's objectives come from the paper's."""

    median_tokens: int
    """Of its prompts in the trace, on the paper's device."""
    a800_solo_s: float
    """Of that prompt; modelled (simulator/roofline.py)."""
    our_solo_s: float
    """Of the same prompt, shortened like all."""

    @property
    def factor(self) -> float:
        return self.our_solo_s / self.a800_solo_s


def class_scales(
    trace: Sequence[TraceRequest], length_scale: float, our_solo_s: SoloSeconds
) -> dict[str, ClassScale]:
    """By SLO class.

    trace: as recorded; length_scale: prompts are so many times as long here
    """
    a800 = RooflineCost(Granularity("whole"))
    lengths: dict[str, list[int]] = {}
    for request in trace:
        lengths.setdefault(objective(request).name, []).append(request.input_tokens)
    scales = {}
    for name, tokens in sorted(lengths.items()):
        median = median_low(tokens)
        ours = our_solo_s(max(1, round(median * length_scale)))
        scales[name] = ClassScale(median, a800.prefill_s(median), ours)
    return scales


def scaled_objectives(
    trace: Sequence[TraceRequest], scales: Mapping[str, ClassScale], slo_scale: float = 1.0
) -> list[Objective]:
    """Of each request of the trace as recorded; slo_scale: times all TTFT objectives."""
    goals = [objective(request) for request in trace]
    return [
        replace(goal, ttft_s=goal.ttft_s * scales[goal.name].factor * slo_scale) for goal in goals
    ]
