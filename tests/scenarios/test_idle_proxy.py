"""A stream through a proxy that cuts what is silent."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.openai.app import FIRST_EVENT_WAIT_S, Settings
from flowprefill.server import TritonServer, free_ports
from flowprefill_client import Client
from tests.live_server import MODEL, wait_for
from tests.openai_calls import post, send_raw
from tests.scenarios.conftest import openai_endpoint
from tests.system_tools import system_tool

ELSEWHERE = {
    30: [
        "tests/e2e/test_openai.py::test_the_official_client_skips_the_comments",
        "tests/e2e/test_openai.py::"
        "test_a_long_prefill_keeps_its_stream_alive_and_then_fails_as_an_event",
    ]
}
IDLE_LIMIT_S = 5
"""As short as proxies have it."""
SENTENCE = "All work and no play makes Jack a dull boy. "  # about 12 tokens
OTHER_LONG_PROMPT = "A watched pot never boils, they say, and wait. " * 500
HAPROXY = """
defaults
    mode http
    timeout connect 2s
    timeout client {idle_limit_s}s
    timeout server {idle_limit_s}s
frontend clients
    bind 127.0.0.1:{port}
    default_backend endpoint
backend endpoint
    server one 127.0.0.1:{target_port}
"""


@contextlib.contextmanager
def proxy(directory: Path, target_port: int, idle_limit_s: int) -> Iterator[int]:
    """Port of an HAProxy that cuts a connection after so much silence."""
    (port,) = free_ports(1)
    config = directory / "haproxy.cfg"
    settings = {"port": port, "target_port": target_port, "idle_limit_s": idle_limit_s}
    config.write_text(HAPROXY.format(**settings))
    process = subprocess.Popen([system_tool("haproxy", "haproxy"), "-db", "-f", config])
    try:
        wait_for(lambda: is_listening(port), what="HAProxy listens")
        yield port
    finally:
        process.kill()
        process.wait()


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


@pytest.mark.parametrize(
    ("idle_limit_s", "settings", "num_ahead", "num_sentences"),
    [
        pytest.param(2, {"keep_alive_s": 0.3}, 1, 250, id="short"),
        pytest.param(IDLE_LIMIT_S, {}, 3, 600, id="default settings", marks=pytest.mark.slow),
    ],
)
def test_a_stream_outlives_a_proxy_s_idle_limit(
    server: TritonServer,
    client: Client,
    tmp_path: Path,
    idle_limit_s: int,
    settings: dict[str, Any],
    num_ahead: int,
    num_sentences: int,
) -> None:
    """Row 30, vllm#47647: no byte is sent while queued or prefilling, and proxies cut requests."""
    keep_alive_s = Settings(server.grpc_url, **settings).keep_alive_s
    longer_than_the_limit = int(idle_limit_s / keep_alive_s) + 1  # comments
    # Its own beginning: no other test has left these blocks in the cache.
    prompt = f"Behind a proxy of {idle_limit_s} s. " + SENTENCE * num_sentences
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ttft_slo_ms": 86_400_000}
    with contextlib.ExitStack() as ends:
        target_port = ends.enter_context(openai_endpoint(server, **settings))
        port = ends.enter_context(proxy(tmp_path, target_port, idle_limit_s))
        ahead = [
            ends.enter_context(client.stream(f"{i} {OTHER_LONG_PROMPT}", ttft_slo_ms=3_600_000))
            for i in range(num_ahead)
        ]
        wait_for(lambda: client.engine_stats()["num_prefilling"], what="the engine is busy")
        connection = ends.enter_context(send_raw(port, {**body, "stream": True}))
        received = ends.enter_context(connection.makefile("rb"))
        # Without stream there is nothing to be sent meanwhile: this proxy does cut what is silent.
        assert post(port, "completions", body)[0].status == 504
        lines: list[bytes] = []
        while lines.count(b": keep-alive\n") < longer_than_the_limit:
            lines.append(received.readline())
            assert lines[-1], "cut in the queue"
        assert lines[0].startswith(b"HTTP/1.1 200")
        for stream in ahead:
            stream.cancel()
        rest = [received.readline()]
        while rest[-1] != b"data: [DONE]\n":
            rest.append(received.readline())
            assert rest[-1], "cut in the prefill"
    first = next(i for i, line in enumerate(rest) if line.startswith(b"data: "))
    assert rest[:first].count(b": keep-alive\n") >= longer_than_the_limit
    *_, last = [line for line in rest[:-1] if line.startswith(b"data: ")]
    assert json.loads(last.removeprefix(b"data: "))["choices"][0]["finish_reason"] == "length"


def test_by_default_two_comments_fit_into_the_shortest_idle_limit() -> None:
    """Row 30, vllm#47647: a comment as seldom as the proxy's limit comes too late."""
    assert 2 * Settings("127.0.0.1:8001").keep_alive_s < IDLE_LIMIT_S
    assert 2 * FIRST_EVENT_WAIT_S < IDLE_LIMIT_S
