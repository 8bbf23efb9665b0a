"""OpenAIProcess: the endpoint as a process that is started, ended, and replaced in its place."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest

from flowprefill.openai.process import OpenAIProcess
from flowprefill.server import free_ports
from flowprefill.supervision import Supervision
from tests.live_server import wait_for
from tests.unit.openai.conftest import WAIT_S, Running

SOON = Supervision(backoff_s=0.01)
START_TIMEOUT_S = 60.0


def health(process: OpenAIProcess) -> int | None:
    """What its port says; None: nobody answers."""
    port = urlsplit(process.url).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status
    return None


def pid_of(process: OpenAIProcess) -> int | None:
    return process._process.pid if process._process else None


@pytest.fixture
def launched(running: Running) -> Iterator[OpenAIProcess]:
    """A process of its own in front of the same server, which has no model to ask by then."""
    running.fake.models = []
    (port,) = free_ports(1)
    process = OpenAIProcess("127.0.0.1", port, running.endpoint.settings.grpc_url, 0)
    process.start(threading.Event())
    yield process
    assert process.stop()


def test_the_launcher_does_not_wait_for_a_model(launched: OpenAIProcess) -> None:
    assert launched.is_alive()


def test_a_proxy_of_the_environment_is_not_used_for_the_model_server(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (port,) = free_ports(1)
    process = OpenAIProcess("127.0.0.1", port, running.endpoint.settings.grpc_url, 0)
    try:
        process.start(threading.Event())
        assert health(process) == 200
    finally:
        assert process.stop()


def test_no_signal_of_the_launcher_s_terminal_reaches_the_endpoint(launched: OpenAIProcess) -> None:
    pid = pid_of(launched)
    assert pid is not None and os.getsid(pid) == pid


@pytest.fixture
def alone() -> Iterator[Callable[..., OpenAIProcess]]:
    """Start one, with limits of its supervision, where there is no model server to talk to."""
    with contextlib.ExitStack() as ends:

        def start(supervision: Supervision, ask_s: float = 5.0) -> OpenAIProcess:
            port, grpc_port = free_ports(2)
            grpc_url = f"127.0.0.1:{grpc_port}"
            limits = {"ask_s": ask_s, "supervision": supervision}
            process = OpenAIProcess("127.0.0.1", port, grpc_url, 0, **limits)
            ends.callback(process.stop)
            process.start(threading.Event())
            return process

        yield start


def tend_until_replaced(process: OpenAIProcess, old: int) -> None:
    def is_replaced() -> bool:
        assert process.tend()
        return pid_of(process) not in (old, None) and health(process) is not None

    wait_for(is_replaced, START_TIMEOUT_S, "another process answers at the same port")


def test_an_endpoint_that_dies_is_started_again_in_its_place(
    alone: Callable[..., OpenAIProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    process = alone(SOON)
    for _ in range(2):
        old = pid_of(process)
        assert old is not None and process.tend()
        os.kill(old, signal.SIGKILL)
        tend_until_replaced(process, old)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith("warning: the OpenAI endpoint was ended by signal 9; it is started")
    assert second.endswith("again in 0.02 s")
    assert process.stop()


def test_an_endpoint_that_hangs_is_replaced(
    alone: Callable[..., OpenAIProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    process = alone(SOON, ask_s=0.2)
    old = pid_of(process)
    assert old is not None and process.tend()
    os.kill(old, signal.SIGSTOP)
    tend_until_replaced(process, old)
    assert "warning: the OpenAI endpoint does not answer; " in capfd.readouterr().err


def test_an_endpoint_that_answers_anything_is_left_in_peace(
    alone: Callable[..., OpenAIProcess],
) -> None:
    process = alone(SOON, ask_s=0.001)
    old = pid_of(process)
    assert health(process) == 503  # without a model server
    assert all(process.tend() for _ in range(20)) and pid_of(process) == old


def test_an_endpoint_that_died_too_often_is_not_started_any_more(
    alone: Callable[..., OpenAIProcess],
) -> None:
    process = alone(Supervision(backoff_s=0.01, max_deaths=2))
    old = pid_of(process)
    assert old is not None and process.tend()
    os.kill(old, signal.SIGKILL)
    tend_until_replaced(process, old)
    new = pid_of(process)
    assert new is not None
    os.kill(new, signal.SIGKILL)
    wait_for(lambda: not process.tend())
    assert pid_of(process) is None and health(process) is None


def test_an_endpoint_that_is_down_needs_no_stop(alone: Callable[..., OpenAIProcess]) -> None:
    process = alone(Supervision(backoff_s=3600.0, max_backoff_s=3600.0))
    old = pid_of(process)
    assert old is not None
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: process.tend() and pid_of(process) is None)
    begin_s = time.monotonic()
    process.drain()
    assert process.stop()
    assert time.monotonic() - begin_s < START_TIMEOUT_S and health(process) is None
