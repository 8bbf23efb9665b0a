"""What is refused: more than may wait, and what can never fit the KV cache."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from statistics import median

from flowprefill.bench.bars import Bar
from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.scenarios.base import Scenario
from flowprefill.bench.scenarios.rig import (
    Rig,
    reading,
    send_together,
    solo_ttft_s,
    ttft_s,
    wait_idle,
    wait_stats,
)
from flowprefill.metrics import percentile
from flowprefill_client import Client, ServerError

_BURST = 200
_BURST_TICKS = (1, 4)
"""Of its prompts: the bound of requests is the first to be met, or the bound of tokens."""
_MAX_WAITING = 16
_MAX_WAITING_TICKS = 32
_MOST_REJECT_S = 0.05
_NUM_LONE = 20


@dataclass(frozen=True)
class _Reply:
    """What a request of the burst got."""

    status: int
    first_s: float
    """From sending it to the refusal, or to the first token, seconds."""
    retry_after: str | None


def burst_beyond_the_queue(rig: Rig) -> list[Bar]:
    """At most 16 requests and 32 C tokens may wait, and 200 requests come at once: of C tokens, of
    which 16 may wait, then of 4 C, of which 8 may.

    Over the OpenAI endpoint, where a refusal is a 429 with Retry-After.
    """
    settings = {
        "max_waiting_requests": _MAX_WAITING,
        "max_waiting_tokens": rig.num_tokens(_MAX_WAITING_TICKS),
    }
    bars: list[Bar] = []
    with rig.model("bounded", **settings) as client:
        url = f"http://127.0.0.1:{rig.openai_port}/v1/completions"
        asyncio.run(_burst(url, [rig.prompt_of(1)]))  # the endpoint comes to know the model
        for num_ticks in _BURST_TICKS:
            replies: list[_Reply] = []
            for _ in range(rig.rounds):
                wait_idle(client)
                prompts = [rig.prompt_of(num_ticks) for _ in range(_BURST)]
                replies += asyncio.run(_burst(url, prompts))
            bars += _judge_burst(rig, num_ticks, replies)
        wait_idle(client)
        # Nobody waits: a prompt nearly as long as all that may wait is taken.
        (lone,) = asyncio.run(_burst(url, [rig.prompt_of(_MAX_WAITING_TICKS - 1)]))
        alone_s = _refusals_of_one(rig, client, url)
    if lone.status != 200:
        raise BenchmarkError(f"a prompt of {_MAX_WAITING_TICKS - 1} C alone: {lone.status}")
    alone = Bar("a refusal while nobody else sends, p99", percentile(alone_s, 99), _MOST_REJECT_S)
    return [*bars, alone]


def _judge_burst(rig: Rig, num_ticks: int, replies: list[_Reply]) -> list[Bar]:
    rejected = [reply for reply in replies if reply.status == 429]
    accepted = [reply for reply in replies if reply.status == 200]
    others = {reply.status for reply in replies} - {200, 429}
    if others or not rejected or not accepted:
        raise BenchmarkError(f"{len(accepted)} accepted, {len(rejected)} refused, others: {others}")
    silent = sum(reply.retry_after is None for reply in rejected)
    of = f"of {num_ticks} C"
    return [
        Bar(f"{of}: a refusal, p99", percentile([r.first_s for r in rejected], 99), _MOST_REJECT_S),
        Bar(
            f"{of}: TTFT of accepted ones, p95",
            percentile([r.first_s for r in accepted], 95),
            1.2 * _MAX_WAITING_TICKS * rig.tick_s,
        ),
        Bar(f"{of}: refused without Retry-After", silent, 0, "requests"),
        Bar(f"{of}: accepted", len(accepted) / rig.rounds, None, "of 200"),
    ]


def _refusals_of_one(rig: Rig, client: Client, url: str) -> list[float]:
    """Times of refusals while the queue is full and does not move, seconds."""
    with contextlib.ExitStack() as stack:
        long = rig.make_prompt(rig.max_model_len // 2)
        stack.enter_context(client.stream(long, max_tokens=1, slo_class="high"))
        wait_stats(client, lambda stats: stats["num_prefilling"] == 1)
        waiting = [rig.prompt_of(1)] * _MAX_WAITING
        for stream in send_together(client, waiting, {"slo_class": "low"}):
            stack.enter_context(stream)
        wait_stats(client, lambda stats: stats["num_waiting"] == _MAX_WAITING)
        replies = [asyncio.run(_burst(url, [rig.prompt_of(1)]))[0] for _ in range(_NUM_LONE)]
    if any(reply.status != 429 for reply in replies):
        raise BenchmarkError("the queue moved before the measurement was over")
    return [reply.first_s for reply in replies]


async def _burst(url: str, prompts: list[str]) -> list[_Reply]:
    """Send all at once, streamed."""
    import aiohttp

    async def send(session: aiohttp.ClientSession, prompt: str) -> _Reply:
        body = {
            "model": "bounded",
            "prompt": prompt,
            "max_tokens": 1,
            "stream": True,
            "ttft_slo_ms": 60_000,
        }
        sent_s = time.monotonic()
        async with session.post(url, json=body) as response:
            if response.status == 200:
                while not (await response.content.readline()).startswith(b"data"):
                    pass
            else:
                await response.read()
            first_s = time.monotonic() - sent_s
            await response.read()
            return _Reply(response.status, first_s, response.headers.get("Retry-After"))

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        return list(await asyncio.gather(*(send(session, prompt) for prompt in prompts)))


def larger_than_the_cache(rig: Rig) -> list[Bar]:
    """A KV cache of half of max_model_len, a prompt of three quarters, then five of 64 tokens."""
    kv_bytes = rig.max_model_len // 2 * rig.kv_values_per_token * 2  # bf16; less room in fp32
    refused_s, behind_s, solo_s = [], [], []
    with rig.model("small_cache", kv_cache_memory_bytes=kv_bytes) as client:
        for _ in range(rig.rounds):
            large = rig.make_prompt(3 * rig.max_model_len // 4)
            prompts = [[rig.make_prompt(64) for _ in range(5)] for _ in range(2)]
            solo_ttft_s(rig, client, 64)
            with reading(send_together(client, prompts[0], {})) as answers:
                solo_s += [ttft_s(answer) for answer in answers()]
            wait_idle(client)
            sent_s = time.monotonic()
            refused = client.stream(large, max_tokens=1)
            with reading(send_together(client, prompts[1], {})) as answers:
                try:
                    next(refused)
                    raise BenchmarkError("a prompt larger than the KV cache was taken")
                except ServerError as error:
                    if "of the KV cache" not in str(error):
                        raise
                refused_s.append(time.monotonic() - sent_s)
                behind_s += [ttft_s(answer) for answer in answers()]
    return [
        Bar("the refusal of the large one, worst", max(refused_s), 1.0),
        Bar("TTFT of those behind it, median", median(behind_s), median(solo_s) + rig.tick_s),
    ]


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("burst", 8, "vllm-project/vllm#18826", burst_beyond_the_queue),
    Scenario("larger-than-kv", 13, "vllm-project/vllm#39734", larger_than_the_cache),
)
