"""The JSON of answers, whole and in chunks."""

from __future__ import annotations

import json

from flowprefill.openai.replies import ChatReply, CompletionReply, usage
from flowprefill.openai.streaming import event
from flowprefill_client import Completion, Delta, TokenLogprob

A = TokenLogprob(1, "a", -1.0, 3)
B = TokenLogprob(2, "b", -0.1, 1)
C = TokenLogprob(3, "c", -0.5, 2)
PART = TokenLogprob(4, "\ufffd", -0.2, 1)


def delta(text: str, reason: str | None = None, *logprobs: tuple[TokenLogprob, ...]) -> Delta:
    return Delta(text, 1, reason, 0.0, logprobs)


def completion(num_input: int, num_output: int, cached: int | None = None) -> Completion:
    timing = None if cached is None else {"num_cached_tokens": cached}
    return Completion("id", "x", "stop", num_input, num_output, 0.1, (0.1,), timing)


def test_a_part_of_a_character_makes_no_chunk() -> None:
    reply = CompletionReply("cmpl-1", "m", 1)
    assert reply.chunk(0, delta("")) is None
    assert reply.chunk(0, delta("", "stop")) is not None
    assert reply.chunk(0, delta("", None, (PART,))) is not None


def test_text_offsets_go_on_over_chunks_of_each_choice() -> None:
    reply = CompletionReply("cmpl-1", "m", 2)
    offsets = []
    for index in (0, 1, 0):
        chunk = reply.chunk(index, delta("ab", None, (A, B), (B,)))
        assert chunk is not None
        offsets.append(chunk["choices"][0]["logprobs"]["text_offset"])
    assert offsets == [[0, 1], [0, 1], [2, 3]]


def test_top_logprobs_of_a_chat_are_the_likeliest_and_not_the_chosen_one_as_well() -> None:
    reply = ChatReply("chatcmpl-1", "m", 1, num_top=2)
    chunk = reply.chunk(0, delta("a", None, (A, B, C)))
    assert chunk is not None
    (token,) = chunk["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("a", [97])
    assert [top["token"] for top in token["top_logprobs"]] == ["b", "c"]


def test_a_token_that_is_no_whole_character_has_no_bytes() -> None:
    reply = ChatReply("chatcmpl-1", "m", 1, num_top=0)
    chunk = reply.chunk(0, delta("", None, (PART,)))
    assert chunk is not None
    (token,) = chunk["choices"][0]["logprobs"]["content"]
    assert token == {"token": "\ufffd", "logprob": -0.2, "bytes": None, "top_logprobs": []}


def test_the_role_comes_once_for_each_choice() -> None:
    reply = ChatReply("chatcmpl-1", "m", 2, num_top=0)
    chunks = [reply.chunk(index, delta("a")) for index in (0, 1, 0)]
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks if chunk]
    assert roles == ["assistant", "assistant", None]


def test_a_prompt_counts_once_for_all_its_choices() -> None:
    answers = [completion(5, 2, 4), completion(5, 3, 5), completion(7, 1), completion(7, 1)]
    assert usage(answers, n=2) == {
        "prompt_tokens": 12,
        "completion_tokens": 7,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_an_event_is_one_line_whatever_the_text() -> None:
    text = "a\nb\r\n\u2028\u0085 é 🙂"
    sent = event({"text": text})
    assert sent.count(b"\n") == 2 and b"\r" not in sent and sent.endswith(b"\n\n")
    assert json.loads(sent.removeprefix(b"data: "))["text"] == text
