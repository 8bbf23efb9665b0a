"""`flowprefill timeline` and servers that break off, refuse or are not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc
from typer.testing import CliRunner

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.timeline import summary
from flowprefill.cli import app
from flowprefill.timeline import DeviceRun, RequestSpan, Timeline
from tests.unit.test_client import error, response

RUN = DeviceRun(1, (1,), 10.0, 10.6, True)
SPAN = RequestSpan(1, "chat", 50, 9.5, 10.6, 12.0)
PART = {"from_s": 10.0, "to_s": 11.0, "facts": {}, "runs": [], "requests": [], "end": ""}


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers every request with the same messages."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def ModelStreamInfer(self, request_iterator: Any, context: Any) -> Iterator[Any]:
        yield from self._messages


@pytest.fixture
def serve() -> Iterator[Callable[[list[Any]], str]]:
    """Start a server that answers so; returns its address."""
    servers = []

    def start(messages: list[Any]) -> str:
        server = grpc.server(ThreadPoolExecutor(2))
        servers.append(server)
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Scripted(messages), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


def part(**content: Any) -> Any:
    return response(json.dumps({**PART, **content}))


def test_a_recording_that_breaks_off_is_written_and_says_so(
    serve: Callable[[list[Any]], str], tmp_path: Path
) -> None:
    content = {"runs": [RUN.to_wire()], "requests": [SPAN.to_wire()]}
    url = serve([part(), part(**content), error("[UNAVAILABLE] engine died")])
    result = CliRunner().invoke(app, ["timeline", "--url", url, "--out", str(tmp_path / "new")])
    assert result.exit_code == 1
    assert "the recording broke off: engine died" in result.stderr
    assert "1.0 s (ended early: broken): 1 requests, 1 with a first token, 1" in result.stdout
    assert "was lost" in (tmp_path / "new" / "timeline.html").read_text()
    trace = json.loads((tmp_path / "new" / "timeline.json").read_text())
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"] == ["on time", "prefill #1"]
    assert trace["otherData"]["model"] == "smollm2"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([error("[UNAVAILABLE] one at a time")], "one at a time"),
        ([response("once upon a time", "stop")], "once upon a time"),
        ([], "no answer"),
    ],
)
def test_without_a_recording_nothing_is_written(
    serve: Callable[[list[Any]], str], tmp_path: Path, messages: list[Any], words: str
) -> None:
    arguments = ["timeline", "--url", serve(messages), "--out", str(tmp_path / "new")]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, BenchmarkError) and words in str(result.exception)
    assert not (tmp_path / "new").exists()


def test_no_server_is_an_error_that_says_so() -> None:
    result = CliRunner().invoke(app, ["timeline", "--url", "127.0.0.1:1"])
    assert isinstance(result.exception, BenchmarkError)
    assert "127.0.0.1:1: UNAVAILABLE" in str(result.exception)


def test_the_summary_counts_who_was_on_time() -> None:
    late = RequestSpan(2, "", 50, 9.5, 10.6, 10.0)
    waiting = RequestSpan(3, "", 50, 9.5, float("inf"), 12.0)
    text = summary(Timeline(10.0, 12.0, {}, [RUN], [SPAN, late, waiting], "time"))
    assert text == ("2.0 s: 3 requests, 2 with a first token, 1 of those on time; device busy 30%")
