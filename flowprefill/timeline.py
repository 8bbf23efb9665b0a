"""What ran on the device when, and what happened to each request. Plain data; pure.

A recorder fills it, of the simulator or of the engine; bench/plots/chrome_trace.py writes it for
Perfetto. Times are seconds on one clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SliceGroup:
    """Slices of one operator group that ran one behind the other."""

    name: str
    start_s: float
    end_s: float
    slice_s: float
    """Length of one of them."""


@dataclass(slots=True)
class DeviceRun:
    """The device worked on one task without a pause."""

    task_id: int | None
    """Of a prefill; runs with the same one are the same prefill. None: a decode step."""
    req_ids: tuple[int, ...]
    """Packed prompts, or the sequences of a step."""
    start_s: float
    end_s: float
    is_done: bool
    """False: it was left before its end."""
    slices: list[SliceGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request from its arrival to its first token."""

    req_id: int
    slo_class: str
    num_tokens: int
    """Of the prompt."""
    arrival_s: float
    first_token_s: float
    """Infinite if it got none."""
    deadline_s: float
    """Infinite if it has none."""

    @property
    def is_on_time(self) -> bool:
        return self.first_token_s <= self.deadline_s


def preempted(runs: Sequence[DeviceRun]) -> list[DeviceRun]:
    """Runs of prefills that were left for another prefill; decode steps in between are none."""
    prefills = [run for run in runs if run.task_id is not None]
    return [
        run
        for run, following in itertools.pairwise(prefills)
        if not run.is_done and following.task_id != run.task_id
    ]
