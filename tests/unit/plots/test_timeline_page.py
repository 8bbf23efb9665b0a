"""The timeline page: its data, and that texts of clients are data only. Drawn in test_browser."""

from __future__ import annotations

import html.parser
import json
import math
import re
from pathlib import Path

import pytest

from flowprefill.bench.plots.timeline_page import page_data, timeline_page, write_timeline_page
from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup, Timeline

EVIL = "</script><img src=x onerror=alert(1)>&\"'\ud800"
LONG = RequestSpan(4, "document", 8000, 99.5, 101.4, 106.0, "long", 101.6, "finished", 16, 2)
SHORT = RequestSpan(9, "chat", 50, 100.5, 100.8, 100.75, "", 100.8, "CANCELLED", 0, 1)
WAITING = RequestSpan(3, "", 50, 101.0, math.inf, math.inf)
RUNS = [
    DeviceRun(7, (4,), 100.0, 100.6, False, [SliceGroup("qkv", 100.0, 100.6, 0.1)]),
    DeviceRun(8, (9,), 100.6, 100.8, True, [SliceGroup("mlp", 100.6, 100.8, 0.1)]),
    DeviceRun(7, (4,), 100.8, 101.4, True, [SliceGroup("mlp", 100.8, 101.4, 0.004)]),
    DeviceRun(None, (4, 9), 101.4, 101.5, True),
]


def recorded(runs: list[DeviceRun], spans: list[RequestSpan], end: str = "time") -> Timeline:
    return Timeline(100.0, 102.0, {"policy": "edf"}, runs, spans, end)


class Elements(html.parser.HTMLParser):
    """Tags, attributes that load something, and the text of scripts by their type."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.scripts: dict[str | None, str] = {}
        self._script: str | None = None
        self._in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [name for name, _ in attrs if name in ("src", "href", "srcset")]
        self._in_script, self._script = tag == "script", dict(attrs).get("type")

    def handle_endtag(self, tag: str) -> None:
        self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def elements(page: str) -> Elements:
    parser = Elements()
    parser.feed(page)
    parser.close()
    return parser


def test_requests_are_in_the_order_of_arrival_and_runs_name_their_places() -> None:
    data = page_data("m", recorded(RUNS, [WAITING, SHORT, LONG]))
    assert data["classes"] == ["", "chat", "document"]
    assert data["requests"] == [
        [4, "long", 2, -500_000, 1_400_000, 6_000_000, 1_600_000, "finished", 8000, 16, 2],
        [9, "", 1, 500_000, 800_000, 750_000, 800_000, "CANCELLED", 50, 0, 1],
        [3, "", 0, 1_000_000, None, None, None, "", 50, 0, 0],
    ]
    assert data["groups"] == ["qkv", "mlp"]
    assert data["duration"] == 2_000_000
    assert data["runs"] == [
        [1, [0], 0, 600_000, 0, 1, [0, 0, 600_000, 100_000]],
        [1, [1], 600_000, 800_000, 1, 0, [1, 600_000, 800_000, 100_000]],
        [1, [0], 800_000, 1_400_000, 1, 0, [1, 800_000, 1_400_000, 4_000]],
        [0, [0, 1], 1_400_000, 1_500_000, 1, 0, []],
    ]


def test_a_run_of_requests_that_nobody_knows_stays_on_the_device() -> None:
    data = page_data("m", recorded([RUNS[3]], [LONG]))
    assert [run[1] for run in data["runs"]] == [[0]]
    assert [run[1] for run in page_data("m", recorded([RUNS[3]], []))["runs"]] == [[]]


@pytest.mark.parametrize(("end", "note"), [("time", ""), ("asked", "early"), ("full", "cut")])
def test_the_page_says_when_it_is_not_the_whole_time(end: str, note: str) -> None:
    found = page_data("m", recorded([], [], end))["note"]
    assert note in found and bool(found) == bool(note)


def test_texts_of_clients_are_data_and_nothing_else() -> None:
    evil = RequestSpan(1, EVIL, 50, 100.0, 100.5, 101.0, EVIL, 101.0, EVIL)
    harmless = timeline_page("m", recorded(RUNS, [LONG, SHORT]))
    page = timeline_page(EVIL[:-1] + "{{script}}", recorded(RUNS, [evil, SHORT]))
    page.encode()
    found = elements(page)
    assert found.tags == elements(harmless).tags
    data = json.loads(found.scripts["application/json"])
    assert data["requests"][0][1] == data["classes"][0] == EVIL
    assert "<" not in found.scripts["application/json"]


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "timeline.html"
    write_timeline_page(path, "m", recorded(RUNS, [LONG, SHORT]))
    page = path.read_text(encoding="utf-8")
    assert elements(page).links == []
    assert "default-src 'none'" in page
    assert not re.search(r"https?:|import\(|fetch\(|XMLHttpRequest|@import|url\(", page)
