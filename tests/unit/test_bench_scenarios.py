"""`bench scenarios`: which are run and what is said of them. The scenarios need a server."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flowprefill.bench.bars import Bar
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.scenarios.base import Result, Scenario
from flowprefill.bench.scenarios.command import all_scenarios, choose, make_table, play
from flowprefill.bench.scenarios.probes import POLLS_PER_S, Probes
from flowprefill.bench.scenarios.rig import Rig
from flowprefill.metrics import percentile
from flowprefill.server import free_ports
from tests.live_server import wait_for


def nothing(rig: Rig) -> Sequence[Bar]:
    return []


FIRST = Scenario("first", 1, "owner/project#1", nothing)
SECOND = Scenario("second", 2, "owner/project#2", nothing)


def test_scenarios_are_run_in_the_order_of_their_rows() -> None:
    assert choose([FIRST, SECOND], None) == [FIRST, SECOND]
    assert choose([FIRST, SECOND], "second,first") == [FIRST, SECOND]
    assert choose([FIRST, SECOND], "second") == [SECOND]
    with pytest.raises(BenchmarkError, match="scenario 'third': must be one of first, second"):
        choose([FIRST, SECOND], "third")


def test_every_scenario_has_a_name_of_its_own_a_row_and_says_what_it_does() -> None:
    scenarios = all_scenarios()
    names = [scenario.name for scenario in scenarios]
    assert len(set(names)) == len(names)
    assert [s.row for s in scenarios] == sorted(s.row for s in scenarios)
    for scenario in scenarios:
        assert 1 <= scenario.row <= 30
        assert scenario.thread.count("#") == 1
        assert scenario.measure.__doc__


def test_a_scenario_is_met_when_every_bar_is() -> None:
    met, missed, told = Bar("a", 1.0, 1.0), Bar("b", 1.001, 1.0), Bar("c", 5.0, None, "prompts")
    assert Result(FIRST, [met, told]).is_met
    result = Result(FIRST, [met, missed])
    assert not result.is_met
    assert result.to_json() == {
        "row": 1,
        "is_met": False,
        "error": None,
        "bars": [
            {"what": "a", "measured": 1.0, "limit": 1.0, "is_floor": False, "unit": "s",
             "is_met": True},
            {"what": "b", "measured": 1.001, "limit": 1.0, "is_floor": False, "unit": "s",
             "is_met": False},
        ],
    }  # fmt: skip
    failed = Result(SECOND, error="the server is gone")
    assert not failed.is_met
    table = make_table([result, failed])
    assert [list(column.cells) for column in table.columns] == [
        ["1", "", "2"],
        ["first", "", "second"],
        ["a", "b", "failed: the server is gone"],
        ["1.000 s", "1.001 s", ""],
        ["<= 1.000 s", "<= 1.000 s", ""],
        ["yes", "no", "no"],
    ]


def test_a_floor_is_met_from_it_on() -> None:
    assert Bar("evictions", 1, 1, "", is_floor=True).is_met
    assert not Bar("evictions", 0, 1, "", is_floor=True).is_met
    table = make_table([Result(FIRST, [Bar("evictions", 1024, 1, "", is_floor=True)])])
    assert [list(column.cells) for column in table.columns][3:] == [["1024"], [">= 1"], ["yes"]]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BenchmarkError("the machine is too noisy"), "the machine is too noisy"),
        (ConnectionResetError("reset"), "ConnectionResetError: reset"),
        (KeyError("vllm:num_requests_running"), "KeyError: 'vllm:num_requests_running'"),
    ],
)
def test_whatever_goes_wrong_in_a_scenario_is_its_result(error: Exception, told: str) -> None:
    def fail(rig: Rig) -> Sequence[Bar]:
        raise error

    result = play(Scenario("fails", 3, "owner/project#3", fail), None)  # type: ignore[arg-type]
    assert (result.error, result.is_met) == (told, False)


# ---- probes -------------------------------------------------------------------------------------


class Page(ThreadingHTTPServer):
    """Answers a GET when `is_open` is set."""

    def __init__(self, status: int = 200) -> None:
        self.is_open = threading.Event()
        self.num_asked = 0

        class Handler(BaseHTTPRequestHandler):
            server: Page

            def do_GET(self) -> None:
                self.server.num_asked += 1
                assert self.server.is_open.wait(60)
                self.send_response(status)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/metrics"


@contextlib.contextmanager
def serving(page: Page) -> Iterator[Page]:
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    try:
        yield page
    finally:
        page.is_open.set()
        page.shutdown()
        page.server_close()
        thread.join()


def test_probes_are_asked_at_their_rate() -> None:
    with serving(Page()) as page, Probes({"metrics": page.url}) as probes:
        page.is_open.set()
        wait_for(lambda: page.num_asked > POLLS_PER_S, what="a second of probes")
        times_s = probes.take()["metrics"]
    assert POLLS_PER_S < len(times_s) == page.num_asked


def test_an_endpoint_that_answered_nothing_until_the_end_shows_in_each_probe() -> None:
    """It is blocked for as long as what is measured lasts, and answers when that is over."""
    blocked_s = 0.5
    with serving(Page()) as page, Probes({"metrics": page.url}) as probes:
        wait_for(lambda: page.num_asked, what="a first probe")
        threading.Timer(blocked_s, page.is_open.set).start()
        page.is_open.wait(60)
        times_s = probes.take()["metrics"]
    assert len(times_s) >= blocked_s * POLLS_PER_S - 1
    assert max(times_s) >= blocked_s and percentile(times_s, 50) > blocked_s / 4


def test_probes_without_an_answer_or_with_another_status_are_an_error() -> None:
    (port,) = free_ports(1)
    gone = {"health": f"http://127.0.0.1:{port}/health"}
    with Probes(gone) as probes, pytest.raises(BenchmarkError, match=r"health: .*statuses \[0\]"):
        probes.take()
    with serving(Page(status=503)) as page, Probes({"health": page.url}) as probes:
        page.is_open.set()
        wait_for(lambda: page.num_asked > 1, what="some probes")
        with pytest.raises(BenchmarkError, match=r"statuses \[503\]"):
            probes.take()
