"""SIGTERM under load: every client gets an end, and the exit code says whether it was its own."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from flowprefill.server import UNLOAD_TIMEOUT_S, free_ports
from flowprefill_client import Client, ServerError
from tests.e2e.test_lifecycle import Served
from tests.live_server import MODEL, wait_for
from tests.scenarios.conftest import status

pytestmark = pytest.mark.e2e
ELSEWHERE = {
    29: [
        "tests/e2e/test_lifecycle.py::test_serve_survives_its_engine_and_leaves_nothing",
        "tests/e2e/test_lifecycle.py::test_the_openai_endpoint_drains_with_the_server_and_leaves_nothing",
        "tests/backend/test_stop.py::test_what_does_not_finish_in_time_is_told_so_and_leaves_the_engine",
    ]
}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
LONG_PROMPT = "All work and no play makes Jack a dull boy. " * 250  # about 3,000 tokens
SLACK_S = 20
"""For nine clients and this test on two cores that others use as well."""
LATER_MS, LAST_MS = 3_600_000, 86_400_000
"""Objectives of the long prefill, and of those that wait behind it."""


@dataclass
class Clients:
    """Of one server, in both ways. How a request ended is its finish reason, or an error's text."""

    grpc: Client
    api: openai.OpenAI

    def by_grpc(self, prompt: str, max_tokens: int, ttft_slo_ms: float | None = None) -> str:
        try:
            answer = self.grpc.generate(
                prompt, max_tokens=max_tokens, ttft_slo_ms=ttft_slo_ms, sampling=GREEDY
            )
        except ServerError as error:
            return str(error)
        return str(answer.finish_reason)

    def by_openai(self, prompt: str, max_tokens: int, ttft_slo_ms: float | None = None) -> str:
        extra = {"ignore_eos": True, "ttft_slo_ms": ttft_slo_ms}
        try:
            *_, last = self.api.completions.create(
                model=MODEL, prompt=prompt, max_tokens=max_tokens, stream=True, extra_body=extra
            )
        except openai.APIError as error:
            return str(error)
        return str(last.choices[0].finish_reason)

    def wait(self, name: str, number: int) -> None:
        """Until the engine counts so many."""
        wait_for(lambda: self.grpc.engine_stats()[name] == number, 60, f"{name} == {number}")


@contextlib.contextmanager
def serving(directory: Path, exit_timeout_s: int) -> Iterator[tuple[Served, Clients, int]]:
    """A `flowprefill serve` with an OpenAI endpoint, its clients, and the endpoint's port."""
    (port,) = free_ports(1)
    served = Served(directory / "serve.log", exit_timeout_s, "--openai-port", str(port))
    try:
        url = f"http://127.0.0.1:{port}/v1"
        with (
            Client(served.grpc_url, MODEL) as grpc,
            openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api,
        ):
            yield served, Clients(grpc, api), port
    finally:
        served.process.terminate()
        served.process.wait(exit_timeout_s + 30)


def send_nine(clients: Clients, pool: ThreadPoolExecutor, stream_tokens: int) -> list[Future[str]]:
    """Four streams, a long prefill, and four that wait behind it; each as it should be by then."""
    ways: list[Callable[..., str]] = [clients.by_grpc, clients.by_openai] * 2
    sent = [pool.submit(way, "Once upon a time", stream_tokens) for way in ways]
    clients.wait("num_decoding", 4)
    sent.append(pool.submit(clients.by_grpc, LONG_PROMPT, 1, LATER_MS))
    clients.wait("num_prefilling", 1)
    sent += [pool.submit(way, "Hello", 4, LAST_MS) for way in ways]
    clients.wait("num_waiting", 4)
    return sent


def test_within_the_limit_all_get_their_answers(tmp_path: Path) -> None:
    """Row 29, vllm#24885: SIGTERM drops all in-flight work; here what is new is refused instead."""
    # Their own time, however slow the machine.
    with serving(tmp_path, 200) as (served, clients, port), ThreadPoolExecutor(9) as pool:
        sent = send_nine(clients, pool, stream_tokens=200)
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: status(f"http://127.0.0.1:{port}/health") == 503, what="it is draining")
        assert "the server is stopping" in clients.by_openai("Hello", 1)
        # In its own words or, once it unloads, in tritonserver's: no available versions.
        wait_for(lambda: clients.by_grpc("Hello", 1) != "length", what="it refuses what is new")
        assert not all(future.done() for future in sent)
        assert [future.result() for future in sent] == ["length"] * 9
        assert served.process.wait(60) == 0, served.log()


@pytest.mark.parametrize(
    "exit_timeout_s", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 60))]
)
def test_at_the_limit_all_get_an_end(tmp_path: Path, exit_timeout_s: int) -> None:
    """Row 29, vllm#24885: SIGTERM drops all in-flight work; at the limit it is told so."""
    with serving(tmp_path, exit_timeout_s) as (served, clients, _), ThreadPoolExecutor(9) as pool:
        sent = send_nine(clients, pool, stream_tokens=8000)
        begin_s = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        ends = [future.result() for future in sent]
        code = served.process.wait(60)
        took_s = time.monotonic() - begin_s
        assert all(end == "length" or "the server is stopping" in end for end in ends), ends
        if exit_timeout_s < 60:  # a fast machine can do all of it in a minute
            assert all("the server is stopping" in end for end in ends[:4])
        num_cut_short = sum(end != "length" for end in ends)
        cut_short = f"error: requests cut short at the exit timeout: {num_cut_short}"
        assert (code, cut_short in served.log()) == ((1, True) if num_cut_short else (0, False))
        # As docs/deploy.md has it; four streams of 8000 tokens would take minutes.
        assert took_s <= exit_timeout_s + UNLOAD_TIMEOUT_S + SLACK_S
