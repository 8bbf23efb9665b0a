"""What routers and operators are told: gauges at rest, and control endpoints under load."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from flowprefill.bench.metrics_page import ENDS, MetricsPage
from flowprefill.server import TritonServer
from flowprefill_client import Client
from tests.live_server import MODEL, wait_for
from tests.metrics_page import page_of, settled
from tests.openai_calls import post, send_raw
from tests.scenarios.conftest import ask_triton, status

ELSEWHERE = {
    27: [
        "tests/e2e/test_metrics.py::test_sums_agree_after_load_and_over_the_engine_s_death",
        "tests/backend/test_metrics.py::test_gauges_are_the_engine_s_and_are_followed_until_it_rests",
    ],
    28: ["tests/e2e/test_openai.py::test_health_waits_neither_for_a_prefill_nor_for_a_large_body"],
}
ENDLESS: dict[str, Any] = {"ignore_eos": True, "temperature": 0}
HALF = 50
"""Streams over gRPC; as many over the OpenAI endpoint."""
AT_REST_S = 2.0
"""From the last client's leaving until no gauge shows anything, as docs/metrics.md has it."""
SLACK_S = 8.0
"""For servers, clients and this test on two cores that others use as well."""
LONG_PROMPT = "All work and no play makes Jack a dull boy. " * 600  # about 7,200 tokens


def urls(server: TritonServer, openai_port: int) -> list[str]:
    """What probes and scrapers ask."""
    triton, api = f"http://{server.http_url}/v2", f"http://127.0.0.1:{openai_port}"
    return [f"{triton}/health/ready", f"{triton}/health/live", f"{triton}/models/{MODEL}/ready",
            server.metrics_url, f"{api}/health", f"{api}/v1/models"]  # fmt: skip


class Probes:
    """Asks control endpoints one after another, and notes how long each takes."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._took_s: dict[str, list[float]] = defaultdict(list)
        self._urls = urls

    def ask(self) -> None:
        for url in self._urls:
            begin_s = time.monotonic()
            assert status(url) == 200, url
            self._took_s[url].append(time.monotonic() - begin_s)

    def assert_prompt(self, limit_s: float) -> None:
        """Of most answers; `flowprefill bench scenarios` has the 99th percentile."""
        medians_s = {url: median(times) for url, times in self._took_s.items()}
        assert max(medians_s.values()) < limit_s, medians_s


def test_a_mass_departure_leaves_no_gauge_behind(
    server: TritonServer, openai_port: int, small_model: str
) -> None:
    """Row 27, vllm#29928: after a mass abort gauges stay frozen, and aborts are in no counter."""

    def is_idle(page: MetricsPage) -> bool:
        return not any(page.gauges().values())

    def is_busy(page: MetricsPage) -> bool:
        names = ("vllm:num_requests_waiting", "vllm:num_requests_running",
                 "vllm:kv_cache_usage_perc", "flowprefill_requests_live")  # fmt: skip
        return all(page.value(name) > 0 for name in names)

    before = settled(server, small_model, is_idle, "the model is idle")

    def counts(page: MetricsPage) -> dict[str, float]:
        names = ("started", *ENDS)
        return {name: page.requests(name) - before.requests(name) for name in names}

    body = {"model": small_model, "prompt": "Hello", "max_tokens": 200, "stream": True, **ENDLESS}
    with Client(server.grpc_url, small_model) as client:
        streams = [client.stream("Hello", max_tokens=200, sampling=ENDLESS) for _ in range(HALF)]
        connections = [send_raw(openai_port, body) for _ in range(HALF)]
        wait_for(
            lambda: counts(page_of(server, small_model))["started"] == 2 * HALF,
            60,
            "all are on the page",
        )
        settled(server, small_model, is_busy, "what they hold is on the page")
        del streams  # until here: a stream that nobody holds is cancelled
    for connection in connections:
        connection.close()
    # Nothing is sent any more: whatever comes to rest does so by itself.
    limit_s = AT_REST_S + SLACK_S
    page = settled(server, small_model, is_idle, "the gauges are at rest", limit_s)
    ended = counts(page)
    assert page.num_lost() == 0
    assert ended["started"] == ended["finished"] + ended["cancelled"] == 2 * HALF
    assert ended["cancelled"] > HALF


def test_control_endpoints_answer_during_a_prefill(
    server: TritonServer, openai_port: int, client: Client, quarter_prefill_s: float
) -> None:
    """Row 28, llama.cpp#24866: /metrics and /health do not answer while a prompt is processed."""
    probes = Probes(urls(server, openai_port))
    with client.stream(LONG_PROMPT, ttft_slo_ms=3_600_000):
        wait_for(lambda: client.engine_stats()["num_prefilling"], what="the prefill has begun")
        for _ in range(10):
            probes.ask()
        assert client.engine_stats()["num_prefilling"] == 1  # nobody waited for its end
    probes.assert_prompt(quarter_prefill_s / 10)


def test_control_endpoints_answer_while_large_bodies_are_read(
    server: TritonServer, openai_port: int, client: Client, quarter_prefill_s: float
) -> None:
    """Row 28, llama.cpp#24866: /health does not answer while a multi-MB body is tokenized."""
    alone = client.generate("Once upon a time", max_tokens=64, sampling=ENDLESS).text
    stream = client.stream("Once upon a time", max_tokens=64, sampling=ENDLESS)
    first = next(stream).text
    text = "x " * 15_000_000

    def send_large() -> None:
        body = {"model": MODEL, "prompt": text, "max_tokens": 1}
        assert post(openai_port, "completions", body)[0].status == 413
        answer = ask_triton(server, MODEL, "generate", {"text_input": text})
        assert "text_input has 30000000 bytes" in answer

    probes, num_rounds = Probes(urls(server, openai_port)), 0
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_large)
        while not sent.done():
            probes.ask()
            num_rounds += 1
    sent.result()
    assert num_rounds > 1
    probes.assert_prompt(quarter_prefill_s / 10)
    assert first + "".join(delta.text for delta in stream) == alone
