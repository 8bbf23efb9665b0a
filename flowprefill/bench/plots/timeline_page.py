"""A timeline as one HTML page that needs nothing else: no server, no network, no library.

The page's parts lie in the folder `page`; here they get their data. Times in it are whole
microseconds from the recording's start, requests are in the order of arrival, and runs name them by
their place in it. Texts of clients, such as ids, reach the page as data only.
"""

from __future__ import annotations

import html
import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowprefill.timeline import DeviceRun, RequestSpan, Timeline, preempted

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "drawing.js", "controls.js")
_WHY_SHORT = {
    "asked": "ended early, when asked to",
    "full": "cut: more cannot be recorded in one piece",
    "stopping": "ended early: the server was stopping",
    "broken": "cut: the connection or the engine was lost",
}


def write_timeline_page(path: Path, title: str, timeline: Timeline) -> None:
    """Write the page; the folder is made. title: what was recorded, for example a model's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(timeline_page(title, timeline), encoding="utf-8")


def timeline_page(title: str, timeline: Timeline) -> str:
    """The page's HTML."""
    page = (_FOLDER / "page.html").read_text(encoding="utf-8")
    script = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    # A script element ends at the first "</script", whatever it stands in.
    data = json.dumps(page_data(title, timeline), separators=(",", ":")).replace("<", "\\u003c")
    parts = {"title": html.escape(title), "script": script, "data": data}
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], page)


def page_data(title: str, timeline: Timeline) -> dict[str, Any]:
    """What the page draws; `read` in data.js says what stands where."""
    spans = sorted(timeline.spans, key=lambda span: (span.arrival_s, span.req_id))
    places = {span.req_id: place for place, span in enumerate(spans)}
    classes = sorted({span.slo_class for span in spans})
    groups = list(dict.fromkeys(group.name for run in timeline.runs for group in run.slices))
    left = {id(run) for run in preempted(timeline.runs)}
    start_s = timeline.from_s
    return {
        "title": title,
        "facts": {key: str(value) for key, value in timeline.facts.items()},
        "note": _WHY_SHORT.get(timeline.end, ""),
        "duration": _us(timeline.to_s - start_s),
        "classes": classes,
        "groups": groups,
        "requests": [_request(span, classes, start_s) for span in spans],
        "runs": [_run(run, places, groups, id(run) in left, start_s) for run in timeline.runs],
    }


def _request(span: RequestSpan, classes: list[str], start_s: float) -> list[Any]:
    times = (span.arrival_s, span.first_token_s, span.deadline_s, span.end_s)
    return [
        span.req_id,
        span.client_id,
        classes.index(span.slo_class),
        *(_us(time_s - start_s) for time_s in times),
        span.outcome,
        span.num_tokens,
        span.num_cached_tokens,
        span.num_output_tokens,
    ]


def _run(
    run: DeviceRun,
    places: Mapping[int, int],
    groups: list[str],
    is_preempted: bool,
    start_s: float,
) -> list[Any]:
    """Operator groups are a flat list: four numbers each."""
    slices = [
        (groups.index(one.name), _us(one.start_s - start_s), _us(one.end_s - start_s),
         _us(one.slice_s))
        for one in run.slices
    ]  # fmt: skip
    return [
        int(run.task_id is not None),
        [places[req_id] for req_id in run.req_ids if req_id in places],
        _us(run.start_s - start_s),
        _us(run.end_s - start_s),
        int(run.is_done),
        int(is_preempted),
        list(itertools.chain(*slices)),
    ]


def _us(time_s: float) -> int | None:
    """None for what is infinite."""
    return round(1e6 * time_s) if math.isfinite(time_s) else None
