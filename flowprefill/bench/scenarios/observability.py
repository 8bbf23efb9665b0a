"""What routers and operators are told: gauges after a mass departure, probes under load."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.scenarios.base import Bar, Scenario
from flowprefill.bench.scenarios.rig import BASE, GREEDY, Rig, send_together, wait_idle, wait_stats
from flowprefill.metrics import percentile
from flowprefill_client import Client

_NUM_STREAMS = 100
_AT_REST_S = 2.0
_WAIT_S = 30.0
_GAUGES = ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc",
           "flowprefill_requests_live")  # fmt: skip
_ENDS = ("finished", "cancelled", "rejected", "failed")
_POLLS_PER_S = 20
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
            begun = _requests(before, "started") + _NUM_STREAMS
            _wait_page(rig, lambda page: _requests(page, "started") == begun)  # noqa: B023
        left_s = time.monotonic()
        _wait_at_rest(rig)
        took_s.append(time.monotonic() - left_s)
        after = _page(rig)
        ended = sum(_requests(after, end) - _requests(before, end) for end in _ENDS)
        lost += abs(_requests(after, "started") - _requests(before, "started") - ended)
    return [
        Bar("from the cut until all gauges are 0, worst", max(took_s), _AT_REST_S),
        Bar("requests without an end", lost, 0, "requests"),
    ]


def _wait_at_rest(rig: Rig) -> None:
    _wait_page(rig, lambda page: not any(page[name] for name in _GAUGES))


def _wait_page(rig: Rig, is_there: Callable[[dict[str, float]], bool]) -> None:
    limit_s = time.monotonic() + _WAIT_S
    while not is_there(_page(rig)):
        if time.monotonic() > limit_s:
            raise BenchmarkError(f"metrics are not as the scenario needs within {_WAIT_S:.0f} s")
        time.sleep(0.01)


def _page(rig: Rig) -> dict[str, float]:
    """Families of the model -> their sums over labels."""
    with urllib.request.urlopen(rig.server.metrics_url, timeout=10) as reply:
        text = reply.read().decode()
    sums: dict[str, float] = dict.fromkeys(_GAUGES, 0.0)
    for name, labels, value in re.findall(r"^([\w:]+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        if f'model="{BASE}"' in labels:
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def _requests(page: dict[str, float], what: str) -> float:
    return page.get(f"flowprefill_requests_{what}_total", 0.0)


# ---- row 28: probes under load ------------------------------------------------------------------


def control_endpoints(rig: Rig) -> list[Bar]:
    """Health and metrics are asked at 20 Hz during the longest prefill, and during bodies of 30 MB.

    A stream runs beside them: its largest gap during the bodies is held against that without.
    """
    with _Probes(rig) as probes:
        wait_idle(rig.client)
        prompt = rig.make_prompt(rig.max_model_len - 1)
        rig.client.generate(prompt, max_tokens=1, ttft_slo_ms=60_000, sampling=GREEDY)
        during_prefill = probes.take()
    bodies = _large_bodies(rig)  # here: it holds the interpreter lock for long
    with ThreadPoolExecutor(1) as pool:
        done = threading.Event()
        gaps = pool.submit(_gaps_until, rig, done)
        wait_stats(rig.client, lambda stats: stats["num_decoding"] > 0)
        time.sleep(1.0)  # of the stream alone
        begin_s = time.monotonic()
        with _Probes(rig) as probes:
            for url, body in rig.rounds * list(bodies.items()):
                if _ask(url, body) == 200:
                    raise BenchmarkError(f"{url} took a body of {len(body)} bytes")
            during_bodies = probes.take()
        end_s = time.monotonic()
        done.set()
        stream_gaps = gaps.result()
    alone = max(gap for at_s, gap in stream_gaps if at_s < begin_s)
    beside = max(gap for at_s, gap in stream_gaps if begin_s <= at_s < end_s)
    bars = [
        Bar(f"{name} during {load}, p99", percentile(times, 99), _LEAST_PROBE_S)
        for load, found in (("a prefill", during_prefill), ("large bodies", during_bodies))
        for name, times in found.items()
    ]
    slack_s = 2 * rig.tick_s
    return [*bars, Bar("a stream's largest gap during large bodies", beside, alone + slack_s)]


def _gaps_until(rig: Rig, done: threading.Event) -> list[tuple[float, float]]:
    """When each token of an endless stream came, and how long after the one before."""
    gaps = []
    with rig.client.stream(rig.make_prompt(16), max_tokens=8000, sampling=GREEDY) as stream:
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


def _ask(url: str, body: bytes | None = None) -> int:
    """Status of a request on a connection of its own."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", parts.path, body)
        response = connection.getresponse()
        response.read()
        return response.status


class _Probes:
    """Asks each control endpoint at a fixed rate inside the block of this context manager."""

    def __init__(self, rig: Rig) -> None:
        self._urls = {
            "Triton's health": f"http://{rig.server.http_url}/v2/health/ready",
            "metrics": rig.server.metrics_url,
            "OpenAI's health": f"http://127.0.0.1:{rig.openai_port}/health",
        }
        self._times_s: dict[str, list[float]] = {name: [] for name in self._urls}
        self._statuses: set[int] = set()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._poll, args=item) for item in self._urls.items()
        ]

    def __enter__(self) -> _Probes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def take(self) -> dict[str, list[float]]:
        """Times of the answers so far, seconds. Raises BenchmarkError unless all are 200s."""
        taken = {name: list(times) for name, times in self._times_s.items()}
        if self._statuses != {200} or not all(taken.values()):
            counts = {name: len(times) for name, times in taken.items()}
            raise BenchmarkError(f"answers: {counts}, statuses: {self._statuses}")
        return taken

    def _poll(self, name: str, url: str) -> None:
        for due_s in self._due():
            if self._stop.wait(max(0.0, due_s - time.monotonic())):
                return
            # From when it was due: a probe that is held up also delays those behind it.
            self._statuses.add(_ask(url))
            self._times_s[name].append(time.monotonic() - due_s)

    @staticmethod
    def _due() -> Iterator[float]:
        begin_s = time.monotonic()
        return (begin_s + number / _POLLS_PER_S for number in itertools.count())


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("mass-departure", 27, "vllm-project/vllm#29928", mass_departure),
    Scenario("control-endpoints", 28, "ggml-org/llama.cpp#24866", control_endpoints),
)
