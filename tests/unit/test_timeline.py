"""Timelines on their way from a server: nothing is lost but digits below the microsecond."""

from __future__ import annotations

import json
import math
from typing import Any

from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup, gather

PREFILL = DeviceRun(7, (1, 2), 10.0, 10.6, False, [SliceGroup("qkv", 10.0, 10.6, 0.1)])
STEP = DeviceRun(None, (3,), 10.6, 10.7, True)
WAITING = RequestSpan(1, "", 50, 9.5, math.inf, 12.0, "mine")
ENDED = RequestSpan(1, "", 50, 9.5, 10.7, 12.0, "mine", 10.9, "finished", 32, 4)


def part(from_s: float, end: str = "", **content: Any) -> dict[str, Any]:
    wire = {"from_s": from_s, "to_s": from_s + 0.5, "facts": None, "end": end}
    return json.loads(json.dumps({**wire, "runs": [], "requests": [], **content}, allow_nan=False))


def test_runs_and_requests_come_back_from_json() -> None:
    for run in (PREFILL, STEP):
        assert DeviceRun.from_wire(json.loads(json.dumps(run.to_wire()))) == run
    for span in (WAITING, ENDED):
        wire = json.dumps(span.to_wire(), allow_nan=False)
        assert RequestSpan.from_wire(json.loads(wire)) == span


def test_times_are_rounded_without_changing_their_order() -> None:
    a, b = DeviceRun(1, (1,), 1 / 3, 2 / 3, True), DeviceRun(2, (2,), 2 / 3, 1.0, True)
    wire_a, wire_b = a.to_wire(), b.to_wire()
    assert wire_a[2:4] == [0.333333, 0.666667]
    assert wire_a[3] == wire_b[2]


def test_parts_become_one_timeline_and_a_request_has_what_is_known_last() -> None:
    timeline = gather(
        [
            part(10.0, facts={"policy": "edf"}),
            part(10.0, runs=[PREFILL.to_wire()], requests=[WAITING.to_wire()]),
            part(10.2, runs=[STEP.to_wire()], requests=[WAITING.to_wire(), ENDED.to_wire()]),
            part(10.5, "time", requests=[WAITING.to_wire()]),
        ]
    )
    assert (timeline.from_s, timeline.to_s, timeline.end) == (10.0, 11.0, "time")
    assert timeline.facts == {"policy": "edf"}
    assert timeline.runs == [PREFILL, STEP]
    assert timeline.spans == [ENDED]


def test_a_recording_without_its_last_part_is_broken() -> None:
    assert gather([part(10.0, facts={})]).end == "broken"
