"""The OpenAI-compatible endpoint: the official client, and raw sockets where it hides too much."""

from __future__ import annotations

import json
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from flowprefill.openai.app import Endpoint, Settings
from flowprefill.openai.server import make_server
from flowprefill.server import TritonServer, free_ports
from flowprefill_client import Client, Stream
from tests.e2e.conftest import LONG_PROMPT, MODEL, SYNC_MODEL, wait_for
from tests.openai_calls import post, send_raw

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
MESSAGES: list[Any] = [
    {"role": "system", "content": "You answer with one word."},
    {"role": "user", "content": [{"type": "text", "text": "The capital of France?"}]},
]
KEEP_ALIVE_S = 0.3


@pytest.fixture(scope="module")
def port(server: TritonServer) -> Iterator[int]:
    """Of the endpoint, in this process and in front of the session's tritonserver."""
    (port,) = free_ports(1)
    endpoint = Endpoint(Settings(server.grpc_url, keep_alive_s=KEEP_ALIVE_S, exit_timeout_s=5))
    running = make_server(endpoint, "127.0.0.1", port)
    thread = threading.Thread(target=running.run)
    thread.start()
    wait_for(lambda: running.started and endpoint.models.is_ready, what="the endpoint is ready")
    yield port
    running.drain()
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def api(port: int) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_completion_is_the_model_s_whole_or_streamed(api: OpenAI, client: Client) -> None:
    expected = client.generate(PROMPT, max_tokens=12, sampling={"temperature": 0})
    whole = api.completions.create(**GREEDY, prompt=PROMPT, max_tokens=12)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == expected.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 12)
    options: Any = {"include_usage": True}
    chunks = list(
        api.completions.create(
            **GREEDY, prompt=PROMPT, max_tokens=12, stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == expected.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


def test_a_chat_is_answered_whole_or_streamed(api: OpenAI) -> None:
    whole = api.chat.completions.create(**GREEDY, messages=MESSAGES, max_completion_tokens=8)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content and "Paris" in message.content
    chunks = list(
        api.chat.completions.create(
            **GREEDY, messages=MESSAGES, max_completion_tokens=8, stream=True
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_chat_without_max_tokens_goes_on_to_its_own_end(api: OpenAI) -> None:
    answer = api.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": "Say hello"}]
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 16


def test_a_stop_string_ends_the_text_and_is_not_in_it(api: OpenAI) -> None:
    request = {**GREEDY, "prompt": "one two three four five six", "max_tokens": 30}
    full = api.completions.create(**request).choices[0].text
    stop = full[8:12]
    streams = [
        [api.completions.create(**request, stop=stop)],
        list(api.completions.create(**request, stop=[stop, "\x00"], stream=True)),
    ]
    for chunks in streams:
        assert "".join(chunk.choices[0].text for chunk in chunks) == full[: full.index(stop)]
        assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs_of_completions(api: OpenAI) -> None:
    choice = api.completions.create(**GREEDY, prompt=PROMPT, max_tokens=4, logprobs=2).choices[0]
    found = choice.logprobs
    assert found and found.tokens and found.token_logprobs and found.top_logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [sum(map(len, found.tokens[:i])) for i in range(4)]
    for token, logprob, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == logprob == max(top.values()) <= 0
        assert len(top) == 2


def test_logprobs_of_chats_are_the_same_streamed(api: OpenAI) -> None:
    request = {
        **{**GREEDY, "messages": MESSAGES, "max_tokens": 4},
        **{"logprobs": True, "top_logprobs": 3, "logit_bias": {"28": -100}},
    }
    whole = api.chat.completions.create(**request).choices[0].logprobs
    assert whole and whole.content and len(whole.content) == 4
    for token in whole.content:
        assert [top.logprob for top in token.top_logprobs] == sorted(
            (top.logprob for top in token.top_logprobs), reverse=True
        )
        assert len(token.top_logprobs) == 3
        assert token.bytes == list(token.token.encode())
    streamed = [
        token
        for chunk in api.chat.completions.create(**request, stream=True)
        if chunk.choices[0].logprobs
        for token in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == whole.content


def test_prompts_may_be_many_and_token_ids(api: OpenAI, client: Client) -> None:
    ids = [504, 3575, 282, 4649, 314]  # PROMPT
    request = {**GREEDY, "max_tokens": 6}
    (expected,) = api.completions.create(**request, prompt=PROMPT).choices
    for prompt in ([PROMPT], ids, [ids]):
        (choice,) = api.completions.create(**request, prompt=prompt).choices
        assert choice.text == expected.text
    answer = api.completions.create(**request, prompt=[PROMPT, "1 2 3 4", PROMPT], n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    texts = [choice.text for choice in answer.choices]
    assert texts[0] == texts[1] == texts[4] == texts[5] == expected.text != texts[2] == texts[3]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 + 7 + 5, 36)


def test_choices_of_one_prompt_differ_and_come_again_with_the_seed(api: OpenAI) -> None:
    request: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12}
    runs = [
        [c.text for c in api.completions.create(**request, n=3, seed=7, temperature=1).choices]
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 3


COMPLETION = {"model": MODEL, "prompt": "Hello", "max_tokens": 2}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    ("completions", {**COMPLETION, "temperature": -1}, "temperature", "[0, 100]"),
    ("completions", {**COMPLETION, "temperature": "hot"}, "temperature", "'hot'"),
    ("completions", {**COMPLETION, "top_p": 2}, "top_p", "(0, 1]"),
    ("completions", {**COMPLETION, "max_tokens": 0}, "max_tokens", "[1, "),
    ("completions", {**COMPLETION, "n": 0}, "n", "[1, 128]"),
    ("completions", {**COMPLETION, "n": 129}, "n", "[1, 128]"),
    ("completions", {**COMPLETION, "logprobs": 21}, "logprobs", "[0, 20]"),
    ("completions", {**COMPLETION, "logit_bias": {"7": 101}}, "logit_bias[7]", "[-100, 100]"),
    ("completions", {**COMPLETION, "best_of": 2}, "best_of", "not supported"),
    ("completions", {**COMPLETION, "echo": True}, "echo", "not supported"),
    ("completions", {**COMPLETION, "suffix": "x"}, "suffix", "not supported"),
    ("completions", {**COMPLETION, "ttft_slo_ms": -5}, "ttft_slo_ms", "> 0"),
    ("completions", {**COMPLETION, "slo_class": "vip"}, "slo_class", "'chat'"),
    ("completions", {**COMPLETION, "stop": ["a"] * 33}, "stop", "32"),
    ("completions", {**COMPLETION, "stop": ""}, "stop", "non-empty"),
    ("completions", {**COMPLETION, "stream_options": {}}, "stream_options", "stream=true"),
    ("completions", {**COMPLETION, "request_id": "é"}, "request_id", "ASCII"),
    ("completions", {"model": MODEL}, "prompt", "None"),
    ("completions", {**COMPLETION, "prompt": ""}, "prompt", "at least one token"),
    ("completions", {**COMPLETION, "prompt": [""]}, "prompt", "at least one token"),
    ("completions", {**COMPLETION, "prompt": []}, "prompt", "not empty"),
    ("completions", {**COMPLETION, "prompt": [999999]}, "prompt[0]", "[0, 49151]"),
    ("completions", {**COMPLETION, "prompt": [5, -1]}, "prompt[1]", "[0, 49151]"),
    ("completions", {**COMPLETION, "prompt": [2**40]}, "prompt[0]", "[0, 49151]"),
    ("completions", {**COMPLETION, "prompt": [1.5]}, "prompt[0]", "1.5"),
    ("completions", {**COMPLETION, "prompt": ["a", 1]}, "prompt[1]", "1: must be"),
    ("chat/completions", {"model": MODEL}, "messages", "None"),
    ("chat/completions", {**CHAT, "messages": []}, "messages", "[]"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user"}]}, "messages[0].content", "None"),
    ("chat/completions", {**CHAT, "tools": [{}]}, "tools", "not supported"),
    (
        "chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}},
        "response_format",
        "not supported",
    ),
    ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": -1}, "top_logprobs", "-1"),
    (
        "chat/completions",
        {**CHAT, "max_completion_tokens": -1},
        "max_completion_tokens",
        "max_completion_tokens=-1",
    ),
    (
        "chat/completions",
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "not supported",
    ),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body", "param", "words"), BAD)
def test_a_bad_request_is_a_400_naming_the_field(
    port: int, path: str, body: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    if stream and "stream_options" in body:
        return  # what is wrong with it whole
    response, answer = post(port, path, {**body, "stream": stream})
    assert response.status == 400, answer
    error = answer["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [8193, 3 * 8192])
def test_a_prompt_over_the_limit_is_a_400_before_any_event(
    port: int, stream: bool, length: int
) -> None:
    body = {**COMPLETION, "prompt": [5] * length, "stream": stream}
    response, answer = post(port, "completions", body)
    assert response.status == 400
    assert "8192" in answer["error"]["message"]


def test_errors_of_routes_and_models_are_openai_s(port: int, api: OpenAI) -> None:
    assert [model.id for model in api.models.list()] == [MODEL]
    assert api.models.retrieve(MODEL).id == MODEL
    for name in ("nobody", SYNC_MODEL):
        with pytest.raises(openai.NotFoundError) as caught:
            api.completions.create(model=name, prompt="Hello")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError):
            api.models.retrieve(name)
    response, answer = post(port, "embeddings", {})
    assert response.status == 404 and "/v1/embeddings" in answer["error"]["message"]
    response, answer = post(port, "models", {})
    assert response.status == 405 and answer["error"]["type"] == "invalid_request_error"
    response, answer = post(port, "completions", b'{"model": ')
    assert response.status == 400 and "JSON" in answer["error"]["message"]


def test_objectives_come_as_fields_or_headers_and_fields_win(port: int) -> None:
    for name, value in (("x-ttft-slo-ms", "soon"), ("x-tbt-slo-ms", "-1"), ("x-slo-class", "vip")):
        response, answer = post(port, "completions", COMPLETION, **{name: value})
        assert response.status == 400, name
        assert (
            repr(value) in answer["error"]["message"] or f"={value}" in answer["error"]["message"]
        )
    body = {**COMPLETION, "slo_class": "chat", "ttft_slo_ms": 900}
    response, answer = post(
        port, "completions", body, **{"x-slo-class": "vip", "x-ttft-slo-ms": "-1"}
    )
    assert response.status == 200, answer


def test_a_request_keeps_the_id_that_its_client_gave(port: int, api: OpenAI) -> None:
    response, answer = post(port, "completions", COMPLETION, **{"x-request-id": "mine-7"})
    assert response.getheader("x-request-id") == "mine-7"
    assert answer["id"] == "cmpl-mine-7"
    with ThreadPoolExecutor(2) as pool:  # two live ones with one id do not disturb each other
        body = {**COMPLETION, "max_tokens": 40, "temperature": 0, "request_id": "twice"}
        texts = list(pool.map(lambda _: post(port, "completions", body)[1]["choices"], range(2)))
    assert texts[0] == texts[1]


def test_unknown_fields_are_ignored(api: OpenAI) -> None:
    extra = {"reasoning_effort": "low", "whatever": [1]}
    assert api.completions.create(**COMPLETION, extra_body=extra).choices[0].text  # type: ignore[call-overload]


def is_idle(client: Client) -> bool:
    stats = client.engine_stats()
    return not any(stats[name] for name in ("num_waiting", "num_prefilling", "num_decoding"))


LAST = {"ttft_slo_ms": 86_400_000}
"""Goes behind whatever has an earlier deadline that can be met."""


def busy_engine(client: Client) -> Stream:
    """A prefill that is under way; a context manager that ends it."""
    wait_for(lambda: is_idle(client), what="the engine is idle")
    stream = client.stream(LONG_PROMPT, ttft_slo_ms=3_600_000)
    wait_for(lambda: client.engine_stats()["num_prefilling"], what="the engine is busy")
    return stream


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_during_prefill_ends_it(
    port: int, client: Client, quarter_prefill_s: float, stream: bool
) -> None:
    """Five times over, as impatient clients do: each prefill ends with its client."""
    wait_for(lambda: is_idle(client), what="the engine is idle")
    before = client.engine_stats()
    for _ in range(5):
        connection = send_raw(port, {**COMPLETION, "prompt": LONG_PROMPT, "stream": stream})
        wait_for(lambda: client.engine_stats()["num_prefilling"], what="the prefill has begun")
        connection.close()
        left_s = time.monotonic()
        wait_for(lambda: is_idle(client), what="the prefill has ended")
        assert time.monotonic() - left_s < quarter_prefill_s
    after = client.engine_stats()
    assert after["num_cancelled"] == before["num_cancelled"] + 5
    assert after["num_prefill_tokens"] == before["num_prefill_tokens"]


def test_a_client_that_leaves_the_queue_is_never_served(port: int, client: Client) -> None:
    with busy_engine(client):
        before = client.engine_stats()
        connections = [send_raw(port, {**COMPLETION, **LAST}) for _ in range(10)]
        wait_for(lambda: client.engine_stats()["num_waiting"] == 10, what="ten wait")
        for connection in connections:
            connection.close()
        wait_for(lambda: client.engine_stats()["num_waiting"] == 0, what="nobody waits")
        after = client.engine_stats()
        assert after["num_cancelled"] == before["num_cancelled"] + 10
        assert after["num_prefill_tokens"] == before["num_prefill_tokens"]


def test_a_long_prefill_keeps_its_stream_alive_and_then_fails_as_an_event(
    port: int, client: Client
) -> None:
    wait_for(lambda: is_idle(client), what="the engine is idle")
    body = {**COMPLETION, "prompt": LONG_PROMPT, "stream": True, "request_id": "slow"}
    connection = send_raw(port, body)
    with connection, connection.makefile("rb") as received:
        lines: list[bytes] = []
        while lines.count(b": keep-alive\n") < 3:
            lines.append(received.readline())
        assert lines[0].startswith(b"HTTP/1.1 200")
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in lines
        assert not any(line.startswith(b"data") for line in lines)
        assert client.cancel("cmpl-slow") is True
        rest = list(iter(received.readline, b"0\r\n"))  # the end of a chunked body
    (event,) = [line for line in rest if line.startswith(b"data: ")]  # and no [DONE]
    assert "cancelled" in json.loads(event.removeprefix(b"data: "))["error"]["message"]


def test_the_official_client_skips_the_comments(port: int, api: OpenAI, client: Client) -> None:
    with busy_engine(client) as busy:
        waiting = send_raw(port, {**COMPLETION, **LAST, "stream": True})
        stream = api.completions.create(**GREEDY, prompt=PROMPT, stream=True, extra_body=LAST)
        with waiting, waiting.makefile("rb") as received:
            while received.readline() != b": keep-alive\n":
                pass
        busy.cancel()
        assert sum(1 for chunk in stream if chunk.choices[0].text) == 16


def test_a_full_queue_is_a_429_that_says_when_to_come_again(
    port: int, api: OpenAI, http: Any, server: TritonServer, repository: Path
) -> None:
    name = "small_queue"
    shutil.copytree(repository / MODEL, repository / name)
    settings = repository / name / "1" / "model.json"
    limits = {"max_waiting_requests": 2, "queue_timeout_ms": 3000, "kv_cache_memory_bytes": 2**29}
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **limits}))
    http.load_model(name)
    try:
        with Client(server.grpc_url, name) as client, busy_engine(client):
            waiting = [send_raw(port, {**COMPLETION, **LAST, "model": name}) for _ in range(2)]
            wait_for(lambda: client.engine_stats()["num_waiting"] == 2, what="the queue is full")
            with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
                api.completions.create(model=name, prompt="Hello")
            assert caught.value.code == "queue_full"
            assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
            for connection in waiting:  # until their time is up
                with connection, HTTPResponse(connection) as response:
                    response.begin()
                    assert response.status == 503
                    assert int(response.getheader("retry-after") or 0) >= 1
                    message = json.loads(response.read())["error"]["message"]
                    assert "did not start within" in message
    finally:
        http.unload_model(name)
    wait_for(lambda: [model.id for model in api.models.list()] == [MODEL], 20, "it is gone")


def test_health_waits_neither_for_a_prefill_nor_for_a_large_body(
    port: int, client: Client, quarter_prefill_s: float
) -> None:
    times_s: list[float] = []
    bodies = [
        ({**COMPLETION, "prompt": "x " * 15_000_000}, 413, "at most 8388608"),
        ({**COMPLETION, "prompt": "x " * 4_000_000}, 400, "text_input has 8000000 bytes"),
        ({**COMPLETION, "prompt": [12345] * 1_000_000}, 400, "bytes: max_model_len 8192"),
    ]
    with busy_engine(client), ThreadPoolExecutor(1) as pool:
        answers = pool.map(lambda body: post(port, "completions", body[0]), bodies)
        last = pool.submit(lambda: None)
        while not last.done():
            started_s = time.monotonic()
            connection = HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            times_s.append(time.monotonic() - started_s)
    for (response, answer), (_, status, words) in zip(answers, bodies, strict=True):
        assert response.status == status
        assert words in answer["error"]["message"]
    # This process makes the bodies too, and they pass through it several times.
    assert statistics.median(times_s) < quarter_prefill_s / 10
