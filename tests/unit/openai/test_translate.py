"""Bodies -> what the client library sends."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.openai.errors import ApiError
from flowprefill.openai.schemas import ChatRequest, CompletionRequest
from flowprefill.openai.translate import (
    MAX_CHOICES,
    Generation,
    chat_generations,
    completion_generations,
    unknown_fields,
)


def complete(**fields: Any) -> list[Generation]:
    return completion_generations(CompletionRequest(**{"model": "m", "prompt": "a", **fields}))


def chat(**fields: Any) -> list[Generation]:
    messages = [{"role": "user", "content": "a"}]
    return chat_generations(ChatRequest(**{"model": "m", "messages": messages, **fields}))


def test_sampling_fields_travel_under_their_names_and_absent_ones_do_not() -> None:
    fields: dict[str, Any] = {
        **{"temperature": 0.5, "top_p": 0.9, "presence_penalty": 1.0, "frequency_penalty": -1.0},
        **{"seed": 3, "logit_bias": {"7": -100.0}, "top_k": 5, "min_p": 0.1, "min_tokens": 2},
        **{"repetition_penalty": 1.1, "stop_token_ids": [4], "ignore_eos": True},
        **{"skip_special_tokens": False, "include_stop_str_in_output": True},
    }
    (generation,) = complete(**fields, max_tokens=9, logprobs=2)
    assert generation == Generation("a", 9, {**fields, "logprobs": 2})
    assert complete(user="u", tenant="t", ttft_slo_ms=5.0) == [Generation("a", None, {})]


@pytest.mark.parametrize(
    ("stop", "sent"), [("a", ["a"]), ('["a"]', ['["a"]']), (["a", "b"], ["a", "b"])]
)
def test_a_stop_string_is_never_read_as_a_list(stop: Any, sent: list[str]) -> None:
    assert complete(stop=stop)[0].sampling == {"stop": sent}


@pytest.mark.parametrize("stop", [7, [7], ["a", None], {"a": 1}])
def test_other_stops_are_refused_by_name(stop: Any) -> None:
    with pytest.raises(ApiError, match=r"^stop=.*: must be a text or a list of texts") as caught:
        complete(stop=stop)
    assert (caught.value.status, caught.value.param) == (400, "stop")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_many(prompt: Any, prompts: list[Any]) -> None:
    assert [generation.prompt for generation in complete(prompt=prompt)] == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (7, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1, 2.5], "prompt[0]"),
        (["a", [1]], "prompt[1]"),
        ([[1], ["a"]], "prompt[1]"),
        (["a"] * (MAX_CHOICES + 1), "prompt"),
    ],
)
def test_other_prompts_are_refused_by_name(prompt: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        complete(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_choices_stand_beside_each_other_and_have_seeds_of_their_own() -> None:
    generations = complete(prompt=["a", "b"], n=2, seed=5)
    assert [(g.prompt, g.sampling["seed"]) for g in generations] == [
        *(("a", 5), ("a", 6)),
        *(("b", 5), ("b", 6)),
    ]
    with pytest.raises(ApiError, match=r"n=65: must be an integer in \[1, 64\] for 2 prompts"):
        complete(prompt=["a", "b"], n=65)


@pytest.mark.parametrize(
    "fields",
    [
        {"echo": False, "suffix": "", "best_of": None},
        {"response_format": {"type": "text"}},
        {"echo": None},
    ],
)
def test_a_field_that_asks_for_nothing_is_not_in_the_way(fields: dict[str, Any]) -> None:
    (generation,) = complete(**fields)
    assert set(generation.sampling) <= {"best_of"}


@pytest.mark.parametrize(
    "fields",
    [{"echo": True}, {"suffix": "x"}, {"tools": [{}]}, {"tool_choice": "required"}, {"audio": {}}],
)
def test_a_field_that_would_change_the_answer_is_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    for ask in (complete, chat):
        with pytest.raises(ApiError, match=f"^{name}=.* is not supported") as caught:
            ask(**fields)
        assert (caught.value.status, caught.value.param) == (400, name)


def test_what_vllm_has_is_left_to_the_backend_to_refuse() -> None:
    assert complete(best_of=2)[0].sampling == {"best_of": 2}
    request = CompletionRequest(model="m", best_of=2, echo=True, whatever=1)
    assert unknown_fields(request) == ["whatever"]


def test_the_newer_name_of_max_tokens_wins() -> None:
    assert chat(max_tokens=5)[0].max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6)[0].max_tokens == 6
    assert chat()[0].max_tokens is None


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_logprobs_of_a_chat(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields)[0].sampling.get("logprobs") == logprobs


def test_messages_keep_role_name_and_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "s", "name": None},
        {"role": "user", "content": parts, "name": "n", "tool_calls": []},
    ]
    (generation,) = chat(messages=messages)
    assert generation.prompt == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb", "name": "n"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("a", "messages[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": ["a"]}, "messages[0].content[0].type"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)
def test_other_messages_are_refused_by_name(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=[message])
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("messages", [None, [], "a"])
def test_a_chat_needs_messages(messages: Any) -> None:
    with pytest.raises(ApiError, match=r"^messages="):
        chat(messages=messages)
