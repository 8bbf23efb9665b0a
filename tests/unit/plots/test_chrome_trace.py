"""Timelines: a valid trace, one device that does one thing at a time, one track per request."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from flowprefill.bench.plots.chrome_trace import (
    DEVICE,
    REQUESTS,
    chrome_trace,
    write_chrome_trace,
)
from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup, preempted

LONG = RequestSpan(0, "file", 8000, 0.0, 1.4, 6.0)
SHORT = RequestSpan(1, "text", 50, 0.5, 0.8, 0.75)
UNANSWERED = RequestSpan(2, "text", 50, 3.0, math.inf, math.inf)
RUNS = [
    DeviceRun(7, (0,), 0.0, 0.6, False, [SliceGroup("qkv", 0.0, 0.6, 0.1)]),
    DeviceRun(8, (1,), 0.6, 0.8, True, [SliceGroup("qkv", 0.6, 0.8, 0.1)]),
    DeviceRun(
        7,
        (0,),
        0.8,
        1.4,
        True,
        [SliceGroup("qkv", 0.8, 1.0, 0.1), SliceGroup("attention", 1.0, 1.4, 0.004)],
    ),
    DeviceRun(None, (0, 1), 1.4, 1.5, True),
]
Event = dict[str, Any]


def check_valid(trace: dict[str, Any]) -> dict[tuple[int, int], list[Event]]:
    """Raise AssertionError unless viewers can show it. Returns the timed events by track."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in json.loads(json.dumps(trace, allow_nan=False))["traceEvents"]:
        assert event["ph"] in {"X", "i", "M"}
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["name"]
        if event["ph"] != "M":
            assert event["ts"] >= 0 and event.get("dur", 0) >= 0
            tracks[event["pid"], event["tid"]].append(event)
    for events in tracks.values():
        times = [event["ts"] for event in events]
        assert times == sorted(times)
        check_nested([event for event in events if event["ph"] == "X"])
    return tracks


def check_nested(bars: list[Event]) -> None:
    """Bars of a track lie beside or inside each other, to the nanosecond."""
    around: list[int] = []
    for bar in bars:
        start, end = nanoseconds(bar)
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1]
        around.append(end)


def nanoseconds(bar: Event) -> tuple[int, int]:
    """Start and end, as viewers read them."""
    start = round(1000 * bar["ts"])
    return start, start + round(1000 * bar["dur"])


def check_device_does_one_thing(tracks: dict[tuple[int, int], list[Event]]) -> None:
    (device,) = (events for (process, _), events in tracks.items() if process == DEVICE)
    times = [nanoseconds(bar) for bar in device]
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(times))


def names(events: list[Event]) -> list[str]:
    return [event["name"] for event in events]


def test_each_request_has_a_track_with_its_groups_and_instants() -> None:
    tracks = check_valid(chrome_trace(RUNS, [LONG, SHORT, UNANSWERED], {}))
    check_device_does_one_thing(tracks)
    assert names(tracks[DEVICE, 1]) == [
        "prefill #0",
        "prefill #1",
        "prefill #0",
        "decode step of 2",
    ]
    long, short, unanswered = (tracks[REQUESTS, i] for i in (1, 2, 3))
    assert names(long) == [
        "on time",
        "qkv",
        "preempted",
        "qkv",
        "attention",
        "first token",
        "deadline",
    ]
    assert names(short) == ["late", "qkv", "deadline", "first token"]
    assert names(unanswered) == ["arrival"]
    assert (long[0]["ts"], long[0]["dur"]) == (0.0, 1.4e6)
    assert long[2] == {
        "name": "preempted",
        "ph": "i",
        "s": "t",
        "pid": REQUESTS,
        "tid": 1,
        "ts": 6e5,
    }
    assert long[4]["args"] == {"slice_ms": 4.0}
    assert short[0]["args"] == {"class": "text", "tokens": 50, "on_time": False, "ttft_ms": 300.0}


def test_tracks_are_named_and_ordered_by_arrival() -> None:
    trace = chrome_trace([], [SHORT, LONG], {})
    metadata = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    named = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in metadata if e["name"] == "thread_name"
    }
    assert named[REQUESTS, 1] == "#0 file, 8000 tokens"
    order = {
        e["tid"]: e["args"]["sort_index"] for e in metadata if e["name"] == "thread_sort_index"
    }
    assert order == {1: 0, 2: 1}


def test_what_a_server_knows_of_a_request_is_there() -> None:
    gone = RequestSpan(4, "chat", 50, 1.0, 1.5, 9.0, "mine", 2.0, "CANCELLED", 16, 1)
    bar, first, failure, deadline = check_valid(chrome_trace([], [gone], {}))[REQUESTS, 5]
    assert bar["args"]["client_id"] == "mine"
    assert names([first, failure, deadline]) == ["first token", "CANCELLED", "deadline"]


def test_a_pack_lists_a_few_requests_and_shows_in_all_their_tracks() -> None:
    ids = tuple(range(9))
    run = DeviceRun(1, ids, 0.0, 1.0, True, [SliceGroup("qkv", 0.0, 1.0, 1.0)])
    tracks = check_valid(chrome_trace([run], [], {}))
    assert names(tracks[DEVICE, 1]) == ["prefill #0 #1 #2 #3 and 5 more"]
    assert all(names(tracks[REQUESTS, i + 1]) == ["qkv"] for i in ids)


def test_only_runs_left_for_another_prefill_are_preempted() -> None:
    step = DeviceRun(None, (9,), 0.6, 0.7, True)
    assert preempted(RUNS) == [RUNS[0]]
    assert preempted([RUNS[0], step, RUNS[2]]) == []
    assert preempted([RUNS[0], step, RUNS[1]]) == [RUNS[0]]


def test_bars_that_touch_do_not_overlap_after_rounding() -> None:
    edges = [i / 7e5 for i in range(2000)]
    runs = [DeviceRun(i, (i,), a, b, True) for i, (a, b) in enumerate(itertools.pairwise(edges))]
    tracks = check_valid(chrome_trace(runs, [], {}))
    device = tracks[DEVICE, 1]
    for bar, following in itertools.pairwise(device):
        assert nanoseconds(bar)[1] == nanoseconds(following)[0]


def test_facts_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    write_chrome_trace(path, RUNS, [LONG, SHORT], {"policy": "s-edf"})
    trace = json.loads(path.read_text())
    check_valid(trace)
    assert trace["otherData"] == {"policy": "s-edf"}
    assert trace["displayTimeUnit"] == "ms"
