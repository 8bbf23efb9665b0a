"""A server that is told to stop under load: every client gets an end, in documented time."""

from __future__ import annotations

import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from flowprefill.bench.bars import Bar
from flowprefill.bench.scenarios.base import Scenario
from flowprefill.bench.scenarios.rig import BASE, GREEDY, Rig, wait_stats
from flowprefill.bench.servers import on_free_ports, write_model
from flowprefill.server import UNLOAD_TIMEOUT_S, TritonServer
from flowprefill_client import Client, ServerError

_EXIT_TIMEOUTS_S = (0, 5, 60)
_NUM_STREAMS = 4
_LATER_MS, _LAST_MS = 3_600_000.0, 86_400_000.0
"""Objectives of the long prefill and of those that wait behind it."""
_WAIT_S = 120.0


def stop_under_load(rig: Rig) -> list[Bar]:
    """Four streams, the longest prefill and four requests behind it: a stop within 0, 5, 60 s.

    Under the longest limit the streams can end by themselves, under the others they cannot.
    """
    return [bar for timeout_s in _EXIT_TIMEOUTS_S for bar in _stop_within(rig, timeout_s)]


def _stop_within(rig: Rig, exit_timeout_s: int) -> list[Bar]:
    is_long = exit_timeout_s == max(_EXIT_TIMEOUTS_S)
    with tempfile.TemporaryDirectory(prefix="flowprefill-bench-") as directory:
        write_model(Path(directory) / BASE, rig.config)
        options = replace(on_free_ports(Path(directory)), exit_timeout_s=exit_timeout_s)
        with (
            TritonServer(options) as server,
            Client(server.grpc_url, BASE) as client,
            ThreadPoolExecutor(2 * _NUM_STREAMS + 1) as pool,
        ):
            sent = _send_nine(rig, client, pool, stream_tokens=100 if is_long else 4000)
            begin_s = time.monotonic()
            is_clean = server.stop()
            took_s = time.monotonic() - begin_s
            ends = [future.result(_WAIT_S) for future in sent]
    # Whoever has no end by then has not been told by the server.
    strange = sum(end not in ("answered", "stopping") for end in ends)
    cut_short = ends.count("stopping")
    limit = f"limit {exit_timeout_s} s"
    return [
        Bar(f"{limit}: until nothing is left", took_s, exit_timeout_s + UNLOAD_TIMEOUT_S),
        Bar(f"{limit}: clients without an end of the server's", strange, 0, "of 9"),
        Bar(
            f"{limit}: told that the server is stopping", cut_short, 0 if is_long else None, "of 9"
        ),
        Bar(f"{limit}: wrong exit", float(is_clean != (cut_short == 0)), 0, ""),
    ]


def _send_nine(
    rig: Rig, client: Client, pool: ThreadPoolExecutor, stream_tokens: int
) -> list[Future[str]]:
    """Each stands where it should when this returns: decoding, prefilling, waiting."""

    def ask(num_tokens: int, max_tokens: int, ttft_slo_ms: float | None) -> str:
        prompt = rig.make_prompt(num_tokens)
        try:
            client.generate(prompt, max_tokens=max_tokens, ttft_slo_ms=ttft_slo_ms, sampling=GREEDY)
        except ServerError as error:
            return "stopping" if "the server is stopping" in str(error) else str(error)
        return "answered"

    sent = [pool.submit(ask, 16, stream_tokens, None) for _ in range(_NUM_STREAMS)]
    wait_stats(client, lambda stats: stats["num_decoding"] == _NUM_STREAMS)
    sent.append(pool.submit(ask, rig.max_model_len - 1, 1, _LATER_MS))
    wait_stats(client, lambda stats: stats["num_prefilling"] == 1)
    sent += [pool.submit(ask, 16, 4, _LAST_MS) for _ in range(_NUM_STREAMS)]
    wait_stats(client, lambda stats: stats["num_waiting"] == _NUM_STREAMS)
    return sent


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("stop-under-load", 29, "vllm-project/vllm#24885", stop_under_load),
)
