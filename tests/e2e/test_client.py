"""The client library and its examples against the real server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from flowprefill.server import TritonServer
from flowprefill_client import AsyncClient, Client, ServerError
from tests.e2e.conftest import MODEL, ROOT, wait_for

EXAMPLES = ROOT / "clients" / "examples"
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0}
LONG_PROMPT = "All work and no play makes Jack a dull boy. " * 250
UNBOUNDED = {"temperature": 0, "ignore_eos": True}


def test_stream_and_generate_give_the_same_answer(client: Client) -> None:
    deltas = list(client.stream(PROMPT, max_tokens=12, sampling=GREEDY))
    answer = client.generate(PROMPT, max_tokens=12, sampling=GREEDY)
    assert "".join(delta.text for delta in deltas) == answer.text
    assert "Paris" in answer.text
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == answer.finish_reason == "length"
    assert sum(delta.num_output_tokens for delta in deltas) == answer.num_output_tokens == 12
    assert answer.num_input_tokens == 5
    assert answer.ttft_s is not None
    assert 0 < answer.ttft_s < answer.delta_times_s[-1]


def test_a_preempted_request_is_told_its_times(client: Client) -> None:
    long = client.stream(LONG_PROMPT, max_tokens=2, ttft_slo_ms=60_000, return_timing=True)
    wait_for(lambda: client.engine_stats()["num_prefilling"], what="the long prefill has begun")
    short = client.generate(PROMPT, max_tokens=2, ttft_slo_ms=200, return_timing=True)
    assert len(list(long)) == 2
    timing = long.completion().timing
    assert timing is not None and short.timing is not None
    assert timing["num_preemptions"] >= 1
    assert timing["queue_s"] + timing["prefill_s"] < timing["ttft_s"]
    assert short.ttft_s is not None and short.timing["ttft_s"] < short.ttft_s
    assert client.generate(PROMPT, max_tokens=2).timing is None


def test_objectives_reach_the_model(client: Client) -> None:
    for name in ("ttft_slo_ms", "tbt_slo_ms"):
        with pytest.raises(ServerError, match=name) as caught:
            client.generate(PROMPT, **{name: -5.0})  # type: ignore[arg-type]
        assert caught.value.status == "INVALID_ARG"
    assert client.generate(PROMPT, ttft_slo_ms=30_000, tbt_slo_ms=5_000, max_tokens=2).text


def test_class_and_tenant_reach_the_model(client: Client) -> None:
    with pytest.raises(ServerError, match="slo_class='vip': must be one of 'chat'") as caught:
        client.generate(PROMPT, slo_class="vip")
    assert caught.value.status == "INVALID_ARG"
    with pytest.raises(ServerError, match="tenant='bbb"):
        client.generate(PROMPT, tenant="b" * 257)
    assert client.generate(PROMPT, slo_class="chat", tenant="blue", max_tokens=2).text


def test_document_seen_before_is_found_computed_and_its_answer_is_the_same(client: Client) -> None:
    prompt = "A note to the reader. " + LONG_PROMPT[:4000]
    cold = client.generate(prompt, max_tokens=12, sampling=UNBOUNDED)
    before = client.engine_stats()["num_cached_tokens"]
    warm = client.generate(prompt, max_tokens=12, sampling=UNBOUNDED)
    assert warm.text == cold.text and len(warm.text) > 12
    found = client.engine_stats()["num_cached_tokens"] - before
    assert found >= 0.95 * cold.num_input_tokens > 800


def test_unknown_model_is_a_server_error(server: TritonServer) -> None:
    with (
        Client(server.grpc_url, "no_such_model") as client,
        pytest.raises(ServerError, match="no_such_model"),
    ):
        client.generate(PROMPT)


def test_leaving_a_stream_early_frees_the_engine(client: Client) -> None:
    with client.stream(PROMPT, max_tokens=4000, sampling=UNBOUNDED) as stream:
        assert next(stream).num_output_tokens == 1
    assert stream.completion().finish_reason == "cancelled"
    wait_for(lambda: client.engine_stats()["num_decoding"] == 0, what="the request has ended")


def test_a_deadline_cancels_on_the_server(client: Client) -> None:
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        client.generate(LONG_PROMPT, max_tokens=4000, sampling=UNBOUNDED, timeout_s=0.5)
    wait_for(lambda: client.engine_stats()["num_kv_blocks_used"] == 0, what="the blocks are free")


def test_cancelling_one_of_two_requests_of_a_connection(client: Client) -> None:
    doomed = client.stream(PROMPT, max_tokens=4000, sampling=UNBOUNDED, request_id="doomed")
    kept = client.stream(PROMPT, max_tokens=12, sampling=GREEDY)
    next(doomed)
    assert client.cancel("doomed") is True
    with pytest.raises(ServerError, match="cancelled") as caught:
        list(doomed)
    assert caught.value.status == "CANCELLED"
    assert len(list(kept)) == 12


def test_async_client_streams_cancels_and_reads_stats(server: TritonServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, MODEL) as client:
            answers = await asyncio.gather(
                *(client.generate(PROMPT, max_tokens=12, sampling=GREEDY) for _ in range(3))
            )
            assert len({answer.text for answer in answers}) == 1
            async with client.stream(
                PROMPT, max_tokens=4000, sampling=UNBOUNDED, request_id="async"
            ) as stream:
                assert (await stream.__anext__()).num_output_tokens == 1
                assert await client.cancel("async") is True
                with pytest.raises(ServerError, match="cancelled"):
                    async for _ in stream:
                        pass
            assert await client.cancel("async") is False
            assert (await client.engine_stats())["num_cancelled"] >= 1

    asyncio.run(scenario())


def run_example(name: str, *arguments: str) -> str:
    example: Path = EXAMPLES / name
    run = subprocess.run(
        [sys.executable, str(example), *arguments], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_http_example(server: TritonServer) -> None:
    output = run_example("http_stream.py", "--url", f"http://{server.http_url}")
    assert "Paris" in output


def test_grpc_example(server: TritonServer) -> None:
    output = run_example("grpc_stream.py", "--url", server.grpc_url)
    assert len(output.strip()) > 20


def test_mixed_priorities_example_answers_the_questions_first(server: TritonServer) -> None:
    lines = run_example("mixed_priorities.py", "--url", server.grpc_url).splitlines()
    assert len(lines) == 4
    assert "document" in lines[-1]
