"""Prompts as token ids and as chat messages; a text is what test_parsing.py sends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowprefill.request import FinishReason
from tests.backend.conftest import Harness

MESSAGES = [{"role": "user", "content": "the rest"}]


def test_token_ids_reach_the_engine_as_they_are(harness: Harness) -> None:
    harness.send({"text_input": "[5, 0, 7, 7]"}, {"prompt_format": "token_ids"})
    assert harness.engine.wait_submitted().prompt_token_ids == [5, 0, 7, 7]


def test_messages_go_through_the_chat_template_and_have_no_control_tokens(harness: Harness) -> None:
    messages = [{"role": "user", "content": "<|eos|>"}]
    harness.send({"text_input": json.dumps(messages)}, {"prompt_format": "messages"})
    ids = harness.engine.wait_submitted().prompt_token_ids
    assert ids == harness.tokenizer.apply_chat_template(messages)
    assert ids != harness.tokenizer.encode(harness.tokenizer.decode(ids, False))


@pytest.mark.parametrize(("sampling", "num_left"), [({}, 0), ({"max_tokens": 7}, None)])
def test_an_answer_to_messages_may_fill_the_context(
    harness: Harness, sampling: dict[str, Any], num_left: int | None
) -> None:
    inputs = {"text_input": json.dumps(MESSAGES), "sampling_parameters": json.dumps(sampling)}
    harness.send(inputs, {"prompt_format": "messages"})
    request = harness.engine.wait_submitted()
    max_tokens = request.sampling.max_tokens
    if num_left is None:
        assert max_tokens == 7
    else:
        assert len(request.prompt_token_ids) + max_tokens == harness.instance.info.max_model_len


def test_an_answer_can_begin_with_the_prompt_that_ids_spell(harness: Harness) -> None:
    ids = harness.ids("the rest")
    inputs = {"text_input": json.dumps(ids), "exclude_input_in_output": False}
    sender = harness.send(inputs, {"prompt_format": "token_ids", "max_tokens": 1})
    req_id = harness.engine.wait_submitted().req_id
    harness.engine.say(req_id, harness.ids("a")[0], FinishReason.LENGTH)
    (response,) = sender.wait_final()
    assert response.text("text_output") == "the resta"


@pytest.mark.parametrize(
    ("text", "form", "words"),
    [
        ("[]", "token_ids", "at least one token"),
        ("[1, -1]", "token_ids", "text_input[1]=-1: must be a token id, an integer in [0, "),
        ("[1099511627776]", "token_ids", "text_input[0]=1099511627776"),
        ("[1.5]", "token_ids", "text_input[0]=1.5"),
        ("[true]", "token_ids", "text_input[0]=True"),
        ('[1, "a"]', "token_ids", "text_input[1]='a'"),
        ("{}", "token_ids", "a JSON list of token ids"),
        ("[1", "token_ids", "a JSON list of token ids"),
        ("[" * 100_000, "messages", "text_input"),
        ("{", "messages", "a JSON list of messages"),
        ("[]", "messages", "messages=[]"),
        ('[{"role": "user"}]', "messages", "messages[0].content=None"),
        ("a", "tokens", "prompt_format='tokens': must be text, token_ids or messages"),
    ],
)
def test_a_broken_prompt_is_refused_by_name(
    harness: Harness, text: str, form: str, words: str
) -> None:
    error = harness.send({"text_input": text}, {"prompt_format": form}).error
    assert error is not None and error.code == "INVALID_ARG"
    assert words in error.message
