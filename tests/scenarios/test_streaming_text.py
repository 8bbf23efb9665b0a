"""What a stream shows of characters and stop strings that span tokens."""
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from flowprefill.request import SLO, FinishReason, TokenOutput
from flowprefill.sampling_params import SamplingParams
from flowprefill.tokenizer import Tokenizer
from flowprefill_backend.answer import Answer, AnswerOptions
from flowprefill_backend.timing import RequestTiming
from flowprefill_client import Client
from tests.live_server import MODEL
from tests.openai_calls import events, post
from tests.unit.reference_bpe import byte_chars
from tests.unit.tokenizer_samples import default_model_path, write_directory

ELSEWHERE = {
    23: [
        "tests/unit/test_text_stream.py::test_any_tokens_stream_to_their_decoded_text",
        "tests/unit/test_text_stream.py::test_bytes_that_are_no_utf8_come_out_as_in_the_full_text",
        "tests/unit/test_text_stream.py::test_a_character_comes_with_its_last_byte",
    ],
    24: [
        "tests/unit/test_text_stream.py::test_nothing_of_a_stop_string_is_emitted",
        "tests/unit/test_text_stream.py::test_stop_strings_cut_as_specified_at_any_split",
        "tests/e2e/test_openai.py::test_a_stop_string_ends_the_text_and_is_not_in_it",
    ],
}
FAMILY = "👨\u200d👩\u200d👧\u200d👦"
ENDLESS = {"temperature": 0, "ignore_eos": True}
SIZES = range(1, 9)
"""Bytes of a token, and tokens of a response."""
VALID = ("a👋b🎉", "한국어 텍스트", "中文字符，你好", FAMILY + "👍🏽🇺🇸", "é e\u0301 ñ", "ภาษาไทย")
INVALID = (
    b"\xff\xfe",
    b"a" + "👋".encode()[:3] + b"b",
    b"\xe4\xb8" + "中".encode(),
    b"\x80\x80\x80ok",
    b"\xed\xa0\x80",
    b"x" + "👋".encode()[:2],
)
STOPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("ABCDEFGHIJKLM", ("DEFGHIJ",), "ABC"),
    ("ABCDEFGHIJKLM", ("D",), "ABC"),
    ("ABCDEFGHIJKLM", ("DEF",), "ABC"),
    ("ABC" + "xyz" * 13 + "x!", ("xyz" * 13 + "x",), "ABC"),
    ("zabc", ("ab", "abc"), "z"),
    ("zabc", ("abc", "bc"), "z"),
    (f"family {FAMILY}.", ("\u200d👧",), "family 👨\u200d👩"),
    ("DEFGHI DEFGHIJ", ("DEFGHIJ",), "DEFGHI "),
    ("DEFGHI", ("DEFGHIJ",), "DEFGHI"),
)


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


class Forced:
    """A tokenizer with a token for each piece of these texts, and answers made of them."""

    def __init__(self, directory: Path) -> None:
        texts = [text.encode() for text in (*VALID, *(text for text, _, _ in STOPS))]
        found = {p for data in (*texts, *INVALID) for size in SIZES for p in pieces(data, size)}
        chars = byte_chars()
        spelled = ["".join(chars[byte] for byte in piece) for piece in sorted(found)]
        backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(spelled)}, []))
        backend.decoder = decoders.ByteLevel()
        self.tokenizer = Tokenizer.load(write_directory(directory, backend))
        self._ids = {piece: i for i, piece in enumerate(sorted(found))}

    def ids(self, data: bytes, size: int) -> list[int]:
        return [self._ids[piece] for piece in pieces(data, size)]

    def deltas(self, ids: Sequence[int], chunking: int, stop: tuple[str, ...] = ()) -> list[str]:
        """Texts of responses of so many tokens each, up to the answer's end."""
        sampling = SamplingParams(max_tokens=len(ids), stop=stop)
        timing = RequestTiming(0.0, SLO(1.0, 1.0))
        options = AnswerOptions(stream=True, prepend_prompt=False)
        answer = Answer(options, "", 1, sampling, self.tokenizer, timing)
        texts = []
        for number, token_id in enumerate(ids, start=1):
            reason = FinishReason.LENGTH if number == len(ids) else None
            reason = answer.add(TokenOutput(0, token_id, reason, logprob=0.0))
            if reason or number % chunking == 0:
                texts.append(answer.take(reason).text)
            if reason:
                break
        return texts


@pytest.fixture(scope="module")
def forced(tmp_path_factory: pytest.TempPathFactory) -> Forced:
    return Forced(tmp_path_factory.mktemp("forced"))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("data", [*map(str.encode, VALID), *INVALID], ids=repr)
def test_deltas_join_to_the_decoded_tokens(forced: Forced, data: bytes, size: int) -> None:
    """Row 23, dynamo#12630: characters split over tokens become U+FFFD, get lost or are doubled."""
    ids = forced.ids(data, size)
    expected = data.decode(errors="replace")
    assert forced.tokenizer.decode(ids) == expected
    for chunking in SIZES:
        texts = forced.deltas(ids, chunking)
        assert "".join(texts) == expected
        emitted = ""
        for text in texts:
            emitted += text
            assert expected.startswith(emitted)  # so U+FFFD comes where it stays, or not at all


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_characters_come_through_the_server_whole(
    openai_port: int, client: Client, seed: int
) -> None:
    """Row 23, dynamo#12630: the same through the server, of tokens forced to be parts of emoji."""
    tokenizer = Tokenizer.load(default_model_path())
    parts = sorted(set(tokenizer.encode_plain("👋🎉" + FAMILY + "ก")))
    bias = {str(token_id): 100 for token_id in parts}
    sampling = {"temperature": 1, "seed": seed, "logit_bias": bias, "max_tokens": 40}
    deltas = list(client.stream("Hello", sampling={**sampling, "logprobs": 0}))
    ids = [token.token_id for delta in deltas for (token, *_) in delta.logprobs]
    expected = tokenizer.decode(ids)
    assert set(ids) <= set(parts) and len(ids) == 40
    assert "".join(delta.text for delta in deltas) == expected
    body = {"model": MODEL, "prompt": "Hello", **sampling}
    _, whole = post(openai_port, "completions", body)
    assert whole["choices"][0]["text"] == expected
    _, raw = post(openai_port, "completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events(raw)) == expected


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("text", "stops", "kept"), STOPS)
def test_nothing_of_a_stop_string_is_shown(
    forced: Forced, text: str, stops: tuple[str, ...], kept: str, size: int
) -> None:
    """Row 24, vllm#3574: pieces of a stop string that spans tokens are shown before it matches."""
    ids = forced.ids(text.encode(), size)
    for chunking in (*SIZES, len(ids)):  # the last is an answer that is not streamed
        assert "".join(forced.deltas(ids, chunking, stops)) == kept


@pytest.mark.parametrize("length", [1, 3, 40])
def test_a_stop_string_of_the_answer_is_never_shown_by_the_server(
    openai_port: int, length: int
) -> None:
    """Row 24, vllm#3574: the same through the server, streamed and not."""
    prompt = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z A B C"
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 48, **ENDLESS}
    _, answer = post(openai_port, "completions", body)
    full = answer["choices"][0]["text"]
    assert len(full) > 60
    stop = full[9 : 9 + length]
    kept = full[: full.index(stop)]
    body["stop"] = [stop, stop + "and more"]
    _, answer = post(openai_port, "completions", body)
    assert answer["choices"][0]["text"] == kept
    assert answer["choices"][0]["finish_reason"] == "stop"
    _, raw = post(openai_port, "completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events(raw)) == kept
