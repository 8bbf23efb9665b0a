"""An unload while requests run: the server says nothing of it, and waits for them without limit."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from flowprefill.request import FinishReason
from flowprefill.server import free_ports
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend import unload_watch
from flowprefill_backend.claim import Claim
from flowprefill_backend.unload_watch import UnloadWatch, ask_server
from tests.backend.conftest import Harness
from tests.backend.fake_pb_utils import WAIT_S, ResponseSender


class Server:
    """What is asked over HTTP."""

    def __init__(self) -> None:
        self.unloads = False
        self._num_asked = 0
        self._changed = threading.Condition()

    def is_unloading(self) -> bool:
        with self._changed:
            self._num_asked += 1
            self._changed.notify_all()
        return self.unloads

    def wait_asked(self, times: int) -> None:
        """From now on."""
        with self._changed:
            target = self._num_asked + times
            assert self._changed.wait_for(lambda: self._num_asked >= target, WAIT_S)


Watch = Callable[[float], tuple[UnloadWatch, list[tuple[str, int]]]]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def watch(harness: Harness, server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Starts one with a limit in seconds; the list gets how many were cut short."""
    monkeypatch.setattr(unload_watch, "POLL_S", 0.005)
    watches: list[UnloadWatch] = []

    def start(drain_s: float) -> tuple[UnloadWatch, list[tuple[str, int]]]:
        cut_short: list[tuple[str, int]] = []
        told = lambda why, number: cut_short.append((why, number))  # noqa: E731
        watches.append(UnloadWatch(harness.instance, server.is_unloading, drain_s, told))
        return watches[-1], cut_short

    yield start
    for each in watches:
        each.close(WAIT_S)


def running_stream(harness: Harness) -> tuple[int, ResponseSender]:
    sender = harness.send({"text_input": "a", "stream": True})
    return harness.engine.wait_submitted().req_id, sender


def is_told_of_the_unload(sender: ResponseSender, why: str = "the model is unloading") -> bool:
    error = sender.error
    assert error is not None
    return (error.code, error.message) == ("UNAVAILABLE", f"Error generating stream: {why}")


def test_what_runs_may_end_within_the_limit(harness: Harness, server: Server, watch: Watch) -> None:
    watching, cut_short = watch(WAIT_S)
    req_id, running = running_stream(harness)
    server.wait_asked(1)
    server.unloads = True
    server.wait_asked(1)
    harness.engine.say(req_id, 100)
    harness.engine.say(req_id, 100, FinishReason.LENGTH)
    assert running.error is None
    watching.close(WAIT_S)
    assert is_told_of_the_unload(harness.send({"text_input": "a"}))
    assert cut_short == []


def test_what_runs_on_is_told_at_the_limit_and_leaves_the_engine(
    harness: Harness, server: Server, watch: Watch
) -> None:
    watching, cut_short = watch(0.0)
    req_id, running = running_stream(harness)
    server.wait_asked(1)
    server.unloads = True
    assert is_told_of_the_unload(running)
    harness.engine.wait_cancelled(req_id)
    watching.close(WAIT_S)
    assert cut_short == [("the model is unloading", 1)]


def test_a_recording_alone_does_not_hold_up_an_unload(
    harness: Harness, server: Server, watch: Watch
) -> None:
    watching, cut_short = watch(WAIT_S)
    recording = harness.send({"text_input": ""}, {"record_timeline": 50})
    recording.wait_responses(1)
    server.unloads = True
    assert json.loads(recording.wait_final()[-1].text())["end"] == "stopping"
    watching.close(WAIT_S)
    assert cut_short == []


@pytest.fixture
def claimed(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Harness]:
    harness = Harness(tokenizer, claim=Claim(tmp_path, "m", "1"))
    yield harness
    harness.instance.close()


def test_an_instance_whose_model_was_loaded_anew_ends_within_the_limit_and_refuses_nobody(
    claimed: Harness, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unload_watch, "POLL_S", 0.005)
    cut_short: list[tuple[str, int]] = []
    watching = UnloadWatch(
        claimed.instance, server.is_unloading, 1.0, lambda why, n: cut_short.append((why, n))
    )
    running_stream(claimed)
    server.wait_asked(2)
    Claim(tmp_path, "m", "1").take()
    late = claimed.send({"text_input": "a"})  # the server has not turned to the new one yet
    req_id = claimed.engine.wait_submitted(2).req_id
    claimed.engine.say(req_id, 100, FinishReason.LENGTH)
    assert late.error is None
    claimed.engine.wait_cancelled(1)
    watching.close(WAIT_S)
    assert cut_short == [("the model was loaded anew", 1)]


def test_all_is_served_while_nobody_unloads(harness: Harness, server: Server, watch: Watch) -> None:
    watch(0.0)
    req_id, running = running_stream(harness)
    server.wait_asked(3)
    harness.engine.say(req_id, 100, FinishReason.LENGTH)
    assert running.error is None


INDEX = [
    {"name": "m", "version": "1", "state": "READY"},
    {"name": "m", "version": "2", "state": "UNLOADING"},
    {"name": "unavailable"},
]


@pytest.mark.parametrize(
    ("body", "version", "unloads"),
    [
        (json.dumps(INDEX), "2", True),
        (json.dumps(INDEX), "1", False),
        (json.dumps(INDEX), "3", False),
        ('{"error": "busy"}', "2", False),
        ("no json", "2", False),
    ],
)
def test_the_server_s_index_says_what_it_unloads(body: str, version: str, unloads: bool) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v2/repository/index"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.handle_request).start()
        assert ask_server(f"127.0.0.1:{http_server.server_port}", "m", version) is unloads


def test_a_server_that_does_not_answer_unloads_nothing() -> None:
    (port,) = free_ports(1)
    assert ask_server(f"127.0.0.1:{port}", "m", "1") is False
