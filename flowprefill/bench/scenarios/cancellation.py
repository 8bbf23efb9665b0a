"""Clients that leave: when it is noticed, and what the prefills they leave behind cost."""

from __future__ import annotations

import json
import socket
import time
from statistics import median
from typing import Any

from flowprefill.bench.bars import Bar
from flowprefill.bench.scenarios.base import Scenario
from flowprefill.bench.scenarios.rig import (
    BASE,
    Rig,
    reading,
    send_together,
    solo_ttft_s,
    ttft_s,
    wait_idle,
    wait_stats,
)

_NUM_LEAVING = 5
_STAYS_TICKS = 5
_SLO: dict[str, Any] = {"ttft_slo_ms": 60_000}
"""Of all requests: a probe that were more urgent would not wait for what its client has left."""


def client_leaves_prefill(rig: Rig) -> list[Bar]:
    """A client closes its connection five ticks into a prefill of 64 C and sends it again, x 5.

    Over the OpenAI endpoint, unstreamed: the server has written nothing when the client leaves. A
    tick of cancelling is the documented latency, so that each prompt may cost five ticks and one.
    """
    latency_s = rig.cancel_latency_s
    solo_s = [solo_ttft_s(rig, rig.client, 64, **_SLO) for _ in range(_NUM_LEAVING)]
    prompt = rig.prompt_of(64)
    noticed_s: list[float] = []
    probe_s: list[float] = []
    before = wait_idle(rig.client)
    for number in range(1, _NUM_LEAVING + 1):
        connection = _post(rig.openai_port, prompt)
        wait_stats(rig.client, lambda stats: stats["num_prefilling"] > 0)
        time.sleep(_STAYS_TICKS * rig.tick_s)
        connection.close()
        left_s = time.monotonic()
        with reading(send_together(rig.client, [rig.make_prompt(64)], _SLO)) as answers:
            _wait_cancelled(rig, before["num_cancelled"] + number)
            noticed_s.append(time.monotonic() - left_s)
            probe_s += map(ttft_s, answers())
        wait_idle(rig.client)
    middle = wait_idle(rig.client)
    whole_s = solo_ttft_s(rig, rig.client, rig.num_tokens(64))
    after = wait_idle(rig.client)
    probe_slices = _NUM_LEAVING * _probe_slices(rig)
    left = middle["num_slices"] - before["num_slices"] - probe_slices
    whole = after["num_slices"] - middle["num_slices"]
    share = _NUM_LEAVING * (_STAYS_TICKS * rig.tick_s + latency_s) / whole_s
    return [
        Bar("from the close to the end of the prefill, worst", max(noticed_s), 2 * latency_s),
        Bar("TTFT of a probe", median(probe_s), median(solo_s) + 2 * latency_s),
        Bar("work of the five that left", left / whole, share, "prompts"),
    ]


def _wait_cancelled(rig: Rig, number: int) -> None:
    """Wait until so many requests have been cancelled since the engine's start."""
    wait_stats(rig.client, lambda stats: stats["num_cancelled"] >= number)


def _probe_slices(rig: Rig) -> int:
    """Slices of one probe of 64 tokens."""
    before = wait_idle(rig.client)
    solo_ttft_s(rig, rig.client, 64)
    return int(wait_idle(rig.client)["num_slices"] - before["num_slices"])


def _post(port: int, prompt: str) -> socket.socket:
    """An open connection on which a completion was asked for."""
    body = {"model": BASE, "prompt": prompt, "max_tokens": 1, **_SLO}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(head.encode() + data)
    return connection


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("client-leaves", 9, "antirez/ds4#333", client_leaves_prefill),
)
