"""The whole endpoint in front of a scripted gRPC server that plays tritonserver."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest

from flowprefill.openai.body import MAX_BODY_BYTES
from flowprefill.openai.models import ModelDirectory
from flowprefill.openai.schemas import CompletionRequest
from flowprefill_client.answer import Recorder
from tests.live_server import wait_for
from tests.unit.openai.conftest import WAIT_S, Running


def test_an_error_behind_the_first_text_is_an_event_and_no_done_follows(running: Running) -> None:
    status, events = running.ask({"prompt": "late", "stream": True})
    assert status == 200
    first, error, end = events
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "so far "
    assert json.loads(error.removeprefix("data: "))["error"]["message"] == "engine died"
    assert end == ""


def test_a_whole_stream_ends_with_usage_and_done(running: Running) -> None:
    options = {"include_usage": True}
    status, events = running.ask({"prompt": "hello", "stream": True, "stream_options": options})
    assert (status, events[-2:]) == (200, ["data: [DONE]", ""])
    *chunks, last = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello ✓"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


def test_a_stream_that_fails_first_is_a_status(running: Running) -> None:
    for stream in (False, True):
        status, answer = running.ask({"prompt": "bad", "stream": stream})
        assert (status, answer["error"]["param"]) == (400, "ttft_slo_ms")


def test_the_failure_of_one_choice_ends_the_others(running: Running) -> None:
    status, answer = running.ask(
        {"prompt": ["wait", "bad beside one that waits"], "request_id": "two"}
    )
    assert (status, answer["error"]["param"]) == (400, "ttft_slo_ms")
    wait_for(lambda: running.fake.ended_early == ["cmpl-two-0"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(running: Running, stream: bool) -> None:
    connection = running.send({"prompt": "wait", "stream": stream, "request_id": "gone"})
    assert running.fake.live.acquire(timeout=WAIT_S)
    connection.close()
    wait_for(lambda: running.fake.ended_early == ["cmpl-gone"])
    wait_for(lambda: running.endpoint.num_live == 0)


def test_comments_come_while_nothing_else_does(running: Running) -> None:
    connection = running.send({"prompt": "wait", "stream": True})
    with connection, connection.makefile("rb") as received:
        lines: list[bytes] = []
        while lines.count(b": keep-alive\n") < 2:
            lines.append(received.readline())
    assert any(line.startswith(b"data: {") for line in lines)


def test_comments_come_while_parts_have_no_text(running: Running) -> None:
    connection = running.send({"prompt": "mute", "stream": True})
    with connection, connection.makefile("rb") as received:
        lines: list[bytes] = []
        while lines.count(b": keep-alive\n") < 2:
            lines.append(received.readline())
    assert not any(line.startswith(b"data: {") for line in lines)


def test_objectives_of_body_and_headers_reach_the_model_and_the_body_wins(running: Running) -> None:
    headers = {
        **{"x-ttft-slo-ms": "300", "x-tbt-slo-ms": "40", "x-slo-class": "chat"},
        **{"x-tenant": "blue", "x-request-id": "r1"},
    }
    assert running.ask({"prompt": "hello"}, **headers)[0] == 200
    body = {"prompt": "hello", "ttft_slo_ms": 200.5, "slo_class": "document", "tenant": "red"}
    assert running.ask(body, **headers)[0] == 200
    sent = [
        {
            name: value.string_param or value.double_param
            for name, value in request.parameters.items()
            if name in ("ttft_slo_ms", "tbt_slo_ms", "slo_class", "tenant")
        }
        for request in running.fake.requests
    ]
    others = {"tbt_slo_ms": 40.0}
    assert sent == [
        {"ttft_slo_ms": 300.0, "slo_class": "chat", "tenant": "blue", **others},
        {"ttft_slo_ms": 200.5, "slo_class": "document", "tenant": "red", **others},
    ]
    assert [request.id for request in running.fake.requests] == ["cmpl-r1"] * 2


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"a"',
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"model": 7, "prompt": "hello"}',
        b'{"prompt": "hello"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "hello", "tenant": "\\ud800"}',
        b'{"model": "m", "prompt": "hello", "stream": "yes"}',
        b'{"model": "m", "prompt": "hello", "seed": 1e400}',
        b'{"model": "m", "prompt": "hello", "request_id": ""}',
    ],
)
def test_a_body_that_is_no_request_is_a_400(running: Running, body: bytes) -> None:
    status, answer = running.ask(body)
    assert status == 400 and answer["error"]["message"]
    assert running.fake.requests == []


def test_a_body_over_the_limit_is_a_413_once_it_is_sent_or_at_once_if_it_is_huge(
    running: Running,
) -> None:
    body = b'"' + b"x" * MAX_BODY_BYTES + b'"'
    status, answer = running.ask(body)
    assert status == 413 and f"at most {MAX_BODY_BYTES}" in answer["error"]["message"]
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 300000000\r\n\r\n"
        connection.sendall(head.encode())
        assert b" 413 " in connection.recv(4096)


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_fault(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
            connection.sendall(head.encode() + b'{"model": "m"')
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1000):  # the endpoint has done with it
                pass
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_only_decoupled_models_are_there(running: Running) -> None:
    status, models = running.ask(None, "/v1/models")
    assert (status, [card["id"] for card in models["data"]]) == (200, ["m", "vllm"])
    assert running.ask(None, "/v1/models/m")[0] == 200
    assert running.ask(None, "/v1/models/facade")[0] == 404
    assert running.ask({"model": "facade", "prompt": "hello"})[0] == 404


def test_a_server_that_is_gone_is_a_503(running: Running) -> None:
    assert running.ask(None, "/health")[0] == 200
    running.grpc_server.stop(None).wait()
    assert running.ask({"prompt": "hello"})[0] == 503
    wait_for(lambda: running.ask(None, "/health")[0] == 503)


def test_draining_refuses_what_is_new_and_ends_what_takes_too_long(running: Running) -> None:
    connection = running.send({"prompt": "wait", "stream": True})
    with connection, connection.makefile("rb") as received:
        assert running.fake.live.acquire(timeout=WAIT_S)
        running.server.drain()
        status, answer = running.ask({"prompt": "hello"})
        assert (status, answer["error"]["message"]) == (503, "the server is stopping")
        assert running.ask(None, "/health")[0] == 503
        running.thread.join(WAIT_S)
        assert not running.thread.is_alive()
        received.read()


def test_an_answer_that_takes_too_long_for_the_drain_is_told_so(running: Running) -> None:
    connections = [running.send({"prompt": "wait", "stream": stream}) for stream in (True, False)]
    for _ in connections:
        assert running.fake.live.acquire(timeout=WAIT_S)
    running.server.drain()
    answers = []
    for connection in connections:
        with connection, connection.makefile("rb") as received:
            answers.append(received.read())
    streamed, whole = answers
    assert streamed.startswith(b"HTTP/1.1 200 ") and whole.startswith(b"HTTP/1.1 503 ")
    for answer in answers:
        assert b'"message":"the server is stopping"' in answer
    assert b"[DONE]" not in streamed


def test_a_body_that_comes_in_while_the_server_drains_is_refused(running: Running) -> None:
    data = json.dumps({"model": "m", "prompt": "hello"}).encode()
    endless = running.send({"prompt": "wait", "stream": True})
    late = socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S)
    with endless, late:
        assert running.fake.live.acquire(timeout=WAIT_S)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        late.sendall(head.encode() + b"expect: 100-continue\r\n\r\n" + data[:9])
        assert late.recv(1000).startswith(b"HTTP/1.1 100 ")  # its body is waited for
        running.server.drain()
        late.sendall(data[9:])
        assert b" 503 " in late.recv(1000)
    assert len(running.fake.requests) == 1


def test_health_is_off_once_the_engines_of_all_models_failed_for_good(running: Running) -> None:
    running.fake.models = ["m"]
    running.fake.engine_state = "failed"
    wait_for(lambda: running.ask(None, "/health")[0] == 503)
    running.fake.engine_state = "ready"  # it was loaded anew
    wait_for(lambda: running.ask(None, "/health")[0] == 200)


def test_only_models_of_this_backend_are_asked_for_the_state_of_their_engine(
    running: Running,
) -> None:
    running.fake.engine_state = "failed"
    asked = running.fake.asked_for_state
    wait_for(lambda: len(asked) > 1)
    assert set(asked) == {"m"}
    assert running.ask(None, "/health")[0] == 200  # vLLM's model can be asked


def test_a_bug_is_a_500_in_openai_s_form_or_an_event(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise KeyError("bug")

    monkeypatch.setattr(Recorder, "add", fail)
    for stream in (False, True):
        status, answer = running.ask({"prompt": "hello", "stream": stream})
        assert (status, answer["error"]["type"]) == (500, "server_error")
    monkeypatch.setattr(CompletionRequest, "model_validate_json", fail)
    status, answer = running.ask({"prompt": "hello"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "KeyError" in answer["error"]["message"]


def test_a_bug_does_not_end_the_following_of_models(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        failed = threading.Event()

        def fail(*args: Any) -> Any:
            failed.set()
            raise KeyError("bug")

        patched.setattr(ModelDirectory, "_ask", fail)
        assert failed.wait(WAIT_S)
    running.fake.models = []
    wait_for(lambda: running.ask(None, "/health")[0] == 503)
