"""Prompts at and over the limit of the context."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from flowprefill.server import TritonServer
from flowprefill_client import Client, ServerError
from tests.openai_calls import post
from tests.scenarios.conftest import SMALL_MAX_LEN, ask_triton

ELSEWHERE = {
    16: [
        "tests/e2e/test_openai.py::test_a_prompt_over_the_limit_is_a_400_before_any_event",
        "tests/e2e/test_bad_input.py::test_oversize_text_is_refused_by_its_bytes",
    ],
    17: [
        "tests/backend/test_parsing.py::test_a_full_context_is_taken_and_one_token_more_is_refused"
    ],
}
DEFAULT_MAX_TOKENS = 16


@pytest.fixture
def small(server: TritonServer, small_model: str) -> Iterator[Client]:
    with Client(server.grpc_url, small_model) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [SMALL_MAX_LEN + 1, 3 * SMALL_MAX_LEN])
def test_an_over_limit_prompt_is_refused_before_it_is_queued(
    server: TritonServer,
    openai_port: int,
    small: Client,
    small_model: str,
    length: int,
    stream: bool,
) -> None:
    """Row 16, vllm#765: the client of an over-limit prompt hangs, or gets 200 with nothing."""
    before = small.engine_stats()
    ways: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": [5] * length}),
        ("completions", {"prompt": " word" * length}),
        ("chat/completions", {"messages": [{"role": "user", "content": " word" * length}]}),
    ]
    for path, prompt in ways:
        body = {"model": small_model, "max_tokens": 1, "stream": stream, **prompt}
        response, answer = post(openai_port, path, body)
        assert response.status == 400
        assert response.getheader("content-type") == "application/json"
        assert f"max_model_len {SMALL_MAX_LEN}" in answer["error"]["message"]
    way = "generate_stream" if stream else "generate"
    text = {"text_input": " word" * length, "max_tokens": 1, "stream": stream}
    answer = ask_triton(server, small_model, way, text)
    assert "error" in answer and f"max_model_len {SMALL_MAX_LEN}" in answer
    with pytest.raises(ServerError, match=f"max_model_len {SMALL_MAX_LEN}"):
        small.generate([5] * length, max_tokens=1)
    assert small.engine_stats()["num_started"] == before["num_started"]
    assert small.generate("Hello", max_tokens=1).num_output_tokens == 1


def test_the_boundary_is_where_prompt_and_answer_fill_the_context(
    openai_port: int, small_model: str
) -> None:
    """Row 17, vllm#16445: a prompt of exactly the limit is handled differently from one below."""
    taken = {}
    below = (DEFAULT_MAX_TOKENS + 1, DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS - 1, 2, 1, 0, -1)
    for length in (SMALL_MAX_LEN - room for room in below):
        for max_tokens in (1, 2, None):
            body = {"model": small_model, "prompt": [5] * length, "ignore_eos": True}
            if max_tokens:
                body["max_tokens"] = max_tokens
            response, answer = post(openai_port, "completions", body)
            asked = max_tokens or DEFAULT_MAX_TOKENS
            taken[length, asked] = response.status == 200
            if response.status == 200:
                usage = answer["usage"]
                assert (usage["prompt_tokens"], usage["completion_tokens"]) == (length, asked)
            else:
                assert response.status == 400
                assert f"max_model_len {SMALL_MAX_LEN}" in answer["error"]["message"]
    assert taken == {(length, asked): length + asked <= SMALL_MAX_LEN for length, asked in taken}


def test_a_chat_without_max_tokens_ends_at_the_limit(openai_port: int, small_model: str) -> None:
    """Row 17, vllm#16445: what is left unset is the room that the prompt leaves, never more."""
    content = " word" * (SMALL_MAX_LEN - 60)
    messages = [{"role": "user", "content": content}]
    body = {"model": small_model, "messages": messages, "ignore_eos": True}
    response, answer = post(openai_port, "chat/completions", body)
    assert response.status == 200, answer
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == SMALL_MAX_LEN
