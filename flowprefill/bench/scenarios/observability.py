"""What routers and operators are told: gauges after a mass departure, probes under load."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from flowprefill.bench.bars import Bar
from flowprefill.bench.metrics_page import ENDS, MetricsPage
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.scenarios.base import Scenario
from flowprefill.bench.scenarios.probes import Probes, ask
from flowprefill.bench.scenarios.rig import BASE, GREEDY, Rig, send_together, wait_idle, wait_stats
from flowprefill.metrics import percentile
from flowprefill_client import Client

_NUM_STREAMS = 100
_AT_REST_S = 2.0
_WAIT_S = 30.0
_GAUGES = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "flowprefill_requests_live")
_LEAST_PROBE_S = 0.05
_BODY_BYTES = 30_000_000


# ---- row 27: all clients leave at once ----------------------------------------------------------


def mass_departure(rig: Rig) -> list[Bar]:
    """100 streams are cut together and nothing is sent any more: the page must come to rest."""
    took_s, lost = [], 0.0
    for _ in range(rig.rounds):
        wait_idle(rig.client)
        _wait_at_rest(rig)
        before = _page(rig)
        with Client(rig.server.grpc_url, BASE) as client:
            prompts = [rig.make_prompt(16) for _ in range(_NUM_STREAMS)]
            streams = send_together(client, prompts, {}, max_tokens=1000)
            next(streams[0])
            begun = before.requests("started") + _NUM_STREAMS
            _wait_page(rig, lambda page: page.requests("started") == begun and _is_busy(page))  # noqa: B023
        left_s = time.monotonic()
        _wait_at_rest(rig)
        took_s.append(time.monotonic() - left_s)
        after = _page(rig)
        ended = sum(after.requests(end) - before.requests(end) for end in ENDS)
        lost += abs(after.requests("started") - before.requests("started") - ended)
    return [
        Bar("from the cut until all gauges are 0, worst", max(took_s), _AT_REST_S),
        Bar("requests without an end", lost, 0, "requests"),
    ]


def _wait_at_rest(rig: Rig) -> None:
    _wait_page(rig, lambda page: not any(page.gauges().values()))


def _is_busy(page: MetricsPage) -> bool:
    """Whether it shows what must go away again."""
    return all(page.value(name) > 0 for name in _GAUGES)


def _wait_page(rig: Rig, is_there: Callable[[MetricsPage], bool]) -> None:
    limit_s = time.monotonic() + _WAIT_S
    while not is_there(_page(rig)):
        if time.monotonic() > limit_s:
            raise BenchmarkError(f"metrics are not as the scenario needs within {_WAIT_S:.0f} s")
        time.sleep(0.01)


def _page(rig: Rig) -> MetricsPage:
    return MetricsPage.fetch(rig.server.metrics_url, BASE)


# ---- row 28: probes under load ------------------------------------------------------------------


def control_endpoints(rig: Rig) -> list[Bar]:
    """Health and metrics are asked at 20 Hz during the longest prefill, and during bodies of 30 MB.

    A stream runs beside the bodies, and as long without: its largest gaps are compared.
    """
    # Here, for they hold the interpreter lock for long and would hold up the probes.
    prompt, bodies = rig.make_prompt(rig.max_model_len - 1), _large_bodies(rig)
    wait_idle(rig.client)
    with Probes(_control_urls(rig)) as probes:
        rig.client.generate(prompt, max_tokens=1, ttft_slo_ms=60_000, sampling=GREEDY)
        during_prefill = probes.take()
    during_bodies, beside_s, alone_s = _beside_bodies(rig, bodies)
    bars = [
        Bar(f"{name} during {load}, p99", percentile(times, 99), _LEAST_PROBE_S)
        for load, found in (("a prefill", during_prefill), ("large bodies", during_bodies))
        for name, times in found.items()
    ]
    limit_s = alone_s + 2 * rig.tick_s
    return [*bars, Bar("a stream's largest gap during large bodies", beside_s, limit_s)]


def _beside_bodies(
    rig: Rig, bodies: dict[str, bytes]
) -> tuple[dict[str, list[float]], float, float]:
    """Times of the probes; the largest gap of a stream beside the bodies, and then without them."""
    with ThreadPoolExecutor(1) as pool:
        done = threading.Event()
        gaps = pool.submit(_gaps_until, rig, done)
        try:
            wait_stats(rig.client, lambda stats: stats["num_decoding"] > 0)
            begin_s = time.monotonic()
            with Probes(_control_urls(rig)) as probes:
                for url, body in rig.rounds * list(bodies.items()):
                    status = ask(url, body)
                    if status in (0, 200):
                        raise BenchmarkError(f"{url}: {status} to a body of {len(body)} bytes")
                times = probes.take()
            end_s = time.monotonic()
            time.sleep(end_s - begin_s)
        finally:
            done.set()
        found = gaps.result()
    alone = [gap for at_s, gap in found if at_s - gap >= end_s]
    beside = [gap for at_s, gap in found if at_s >= begin_s and at_s - gap < end_s]
    if not alone or not beside:
        raise BenchmarkError("the stream ended before the measurement did")
    return times, max(beside), max(alone)


def _control_urls(rig: Rig) -> dict[str, str]:
    return {
        "Triton's health": f"http://{rig.server.http_url}/v2/health/ready",
        "metrics": rig.server.metrics_url,
        "OpenAI's health": f"http://127.0.0.1:{rig.openai_port}/health",
    }


def _gaps_until(rig: Rig, done: threading.Event) -> list[tuple[float, float]]:
    """When each token of an endless stream came, and how long after the one before."""
    gaps = []
    longest = rig.max_model_len - 16
    with rig.client.stream(rig.make_prompt(16), max_tokens=longest, sampling=GREEDY) as stream:
        next(stream)
        last_s = time.monotonic()
        for _ in stream:
            now_s = time.monotonic()
            gaps.append((now_s, now_s - last_s))
            last_s = now_s
            if done.is_set():
                break
    return gaps


def _large_bodies(rig: Rig) -> dict[str, bytes]:
    """URL -> a body that is over every limit, for each HTTP port."""
    text = "x " * (_BODY_BYTES // 2)
    bodies: dict[str, dict[str, str]] = {
        f"http://{rig.server.http_url}/v2/models/{BASE}/generate": {"text_input": text},
        f"http://127.0.0.1:{rig.openai_port}/v1/completions": {"model": BASE, "prompt": text},
    }
    return {url: json.dumps(body).encode() for url, body in bodies.items()}


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("mass-departure", 27, "vllm-project/vllm#29928", mass_departure),
    Scenario("control-endpoints", 28, "ggml-org/llama.cpp#24866", control_endpoints),
)
