"""Timelines as Chrome trace events, to be opened in https://ui.perfetto.dev.

The process "device" has one track: what it ran, task by task. The process "requests" has a track
per request: a bar from arrival to first token, in it the operator groups that ran for the request;
instants mark its preemptions, first token, deadline and failure. Format: "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowprefill.timeline import DeviceRun, RequestSpan, preempted

DEVICE, REQUESTS = 1, 2
"""Process ids."""
_MAX_NAMES = 4
"""Requests that the name of a run lists."""

Json = dict[str, Any]


def write_chrome_trace(
    path: Path,
    runs: Sequence[DeviceRun],
    requests: Sequence[RequestSpan],
    facts: Mapping[str, Any],
) -> None:
    """Write the trace; the folder is made. facts: what Perfetto shows as the trace's info."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chrome_trace(runs, requests, facts)), encoding="utf-8")


def chrome_trace(
    runs: Sequence[DeviceRun], requests: Sequence[RequestSpan], facts: Mapping[str, Any]
) -> Json:
    """The JSON object. Events are in the order of time; times in it are microseconds."""
    events = [*_device_events(runs), *_request_events(runs, requests)]
    # Of two that begin together the longer one is around the other.
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {
        "displayTimeUnit": "ms",
        "otherData": dict(facts),
        "traceEvents": [*_names(requests), *events],
    }


def _device_events(runs: Sequence[DeviceRun]) -> Iterator[Json]:
    for run in runs:
        arguments = {"requests": list(run.req_ids), "done": run.is_done}
        yield _bar(DEVICE, 1, _run_name(run), run.start_s, run.end_s, arguments)


def _run_name(run: DeviceRun) -> str:
    if run.task_id is None:
        return f"decode step of {len(run.req_ids)}"
    names = [f"#{req_id}" for req_id in run.req_ids[:_MAX_NAMES]]
    more = len(run.req_ids) - len(names)
    return f"prefill {' '.join(names)}{f' and {more} more' if more else ''}"


def _request_events(runs: Sequence[DeviceRun], requests: Sequence[RequestSpan]) -> Iterator[Json]:
    for request in requests:
        yield from _request_bar(request)
    for run in runs:
        for req_id in run.req_ids if run.task_id is not None else ():
            for group in run.slices:
                arguments = {"slice_ms": round(1000 * group.slice_s, 4)}
                times_s = group.start_s, group.end_s
                yield _bar(REQUESTS, _track(req_id), group.name, *times_s, arguments)
    for run in preempted(runs):
        for req_id in run.req_ids:
            yield _instant(req_id, "preempted", run.end_s)


def _request_bar(request: RequestSpan) -> Iterator[Json]:
    is_answered = request.first_token_s < math.inf
    arguments = {
        "class": request.slo_class,
        "tokens": request.num_tokens,
        "on_time": request.is_on_time,
        "ttft_ms": round(1000 * (request.first_token_s - request.arrival_s), 3)
        if is_answered
        else None,
    }
    if request.client_id:
        arguments["client_id"] = request.client_id
    if is_answered:
        name = "on time" if request.is_on_time else "late"
        times_s = request.arrival_s, request.first_token_s
        yield _bar(REQUESTS, _track(request.req_id), name, *times_s, arguments)
        yield _instant(request.req_id, "first token", request.first_token_s)
    else:
        yield _instant(request.req_id, "arrival", request.arrival_s)
    if request.deadline_s < math.inf:
        yield _instant(request.req_id, "deadline", request.deadline_s)
    if request.end_s < math.inf and request.outcome != "finished":
        yield _instant(request.req_id, request.outcome, request.end_s)


def _bar(
    process: int, track: int, name: str, start_s: float, end_s: float, arguments: Json
) -> Json:
    # Both ends are rounded, not the length: bars that touch must not come to overlap.
    start_us, end_us = _microseconds(start_s), _microseconds(end_s)
    duration_us = round(end_us - start_us, 3)
    place = {"pid": process, "tid": track, "ts": start_us, "dur": duration_us}
    return {"name": name, "ph": "X", **place, "args": arguments}


def _instant(req_id: int, name: str, time_s: float) -> Json:
    place = {"pid": REQUESTS, "tid": _track(req_id), "ts": _microseconds(time_s)}
    return {"name": name, "ph": "i", "s": "t", **place}


def _track(req_id: int) -> int:
    """Viewers take thread 0 for something else."""
    return req_id + 1


def _microseconds(time_s: float) -> float:
    return round(1e6 * time_s, 3)


def _names(requests: Sequence[RequestSpan]) -> Iterator[Json]:
    """What tracks are called, and their order."""
    yield _metadata("process_name", DEVICE, 1, name="device")
    yield _metadata("process_name", REQUESTS, 1, name="requests, by arrival")
    yield _metadata("thread_name", DEVICE, 1, name="tasks")
    ordered = sorted(requests, key=lambda r: (r.arrival_s, r.req_id))
    for index, request in enumerate(ordered):
        track = _track(request.req_id)
        name = f"#{request.req_id} {request.slo_class}, {request.num_tokens} tokens"
        yield _metadata("thread_name", REQUESTS, track, name=name)
        yield _metadata("thread_sort_index", REQUESTS, track, sort_index=index)


def _metadata(what: str, process: int, track: int, **arguments: Any) -> Json:
    return {"name": what, "ph": "M", "pid": process, "tid": track, "args": arguments}
