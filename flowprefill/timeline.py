"""What ran on the device when, and what happened to each request. Plain data; pure.

A recorder fills it, of the simulator or of the engine; bench/plots/chrome_trace.py writes it for
Perfetto, timeline_page.py beside it as a page. Times are seconds on one clock; on the way from a
server to its client they are rounded to the microsecond.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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
    """Of a prefill."""

    def to_wire(self) -> list[Any]:
        groups = [
            [group.name, _round(group.start_s), _round(group.end_s), _round(group.slice_s)]
            for group in self.slices
        ]
        times = [_round(self.start_s), _round(self.end_s)]
        return [self.task_id, list(self.req_ids), *times, self.is_done, groups]

    @staticmethod
    def from_wire(wire: list[Any]) -> DeviceRun:
        task_id, req_ids, start_s, end_s, is_done, groups = wire
        slices = [SliceGroup(*group) for group in groups]
        return DeviceRun(task_id, tuple(req_ids), start_s, end_s, is_done, slices)


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request: its way to the first token, and its end where that was noted."""

    req_id: int
    slo_class: str
    num_tokens: int
    """Of the prompt."""
    arrival_s: float
    first_token_s: float
    """Infinite if it got none."""
    deadline_s: float
    """Infinite if it has none."""
    client_id: str = ""
    """What its client calls it; "" = not known."""
    end_s: float = math.inf
    """Infinite while it runs, and where ends are not noted."""
    outcome: str = ""
    """"finished", or the code of the error that ended it; "" without an end."""
    num_cached_tokens: int = 0
    """Of the prompt."""
    num_output_tokens: int = 0

    @property
    def is_on_time(self) -> bool:
        return self.first_token_s <= self.deadline_s

    def to_wire(self) -> list[Any]:
        """None for what is infinite, which JSON cannot say."""
        values = [getattr(self, one.name) for one in dataclasses.fields(self)]
        return [_to_wire(value) if isinstance(value, float) else value for value in values]

    @staticmethod
    def from_wire(wire: list[Any]) -> RequestSpan:
        values: list[Any] = [math.inf if value is None else value for value in wire]
        return RequestSpan(*values)


@dataclass
class Timeline:
    """What a server recorded in one stretch of time."""

    from_s: float
    to_s: float
    facts: dict[str, Any]
    """Of the engine."""
    runs: list[DeviceRun]
    """What the device did, in order, without overlaps."""
    spans: list[RequestSpan]
    end: str
    """"time": it is as long as was asked for; else why it ended before: "asked", "full" (more
    cannot be recorded in one piece), "stopping" (the model is), "broken" (no end came)."""


def gather(parts: Sequence[dict[str, Any]]) -> Timeline:
    """The parts of a recording, as a server sends them, in one. At least the first one is there."""
    spans: dict[int, RequestSpan] = {}
    for part in parts:
        for wire in part["requests"]:
            span = RequestSpan.from_wire(wire)
            # Later parts know more, but for an end that is noted just before the request goes.
            if span.outcome or not (span.req_id in spans and spans[span.req_id].outcome):
                spans[span.req_id] = span
    return Timeline(
        parts[0]["from_s"],
        parts[-1]["to_s"],
        parts[0]["facts"],
        [DeviceRun.from_wire(wire) for part in parts for wire in part["runs"]],
        list(spans.values()),
        parts[-1]["end"] or "broken",
    )


def preempted(runs: Sequence[DeviceRun]) -> list[DeviceRun]:
    """Runs of prefills that were left for another prefill; decode steps in between are none."""
    prefills = [run for run in runs if run.task_id is not None]
    return [
        run
        for run, following in itertools.pairwise(prefills)
        if not run.is_done and following.task_id != run.task_id
    ]


def _round(time_s: float) -> float:
    return round(time_s, 6)


def _to_wire(value: float) -> float | None:
    return _round(value) if math.isfinite(value) else None
