"""Streamed text: whole characters, no part of a stop string, the same as the text of all tokens."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.sampling_params import SamplingParams
from flowprefill.text_stream import TextStream
from flowprefill.tokenizer import Tokenizer
from tests.unit.tokenizer_samples import (
    byte_level_backend,
    default_model_path,
    nasty_texts,
    sentencepiece_backend,
    write_directory,
)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(default_model_path())


@pytest.fixture(scope="module", params=[byte_level_backend, sentencepiece_backend])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    """Both kinds of decoder, with tokens for all 256 bytes."""
    return Tokenizer.load(write_directory(tmp_path_factory.mktemp("small"), request.param()))


def byte_token_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte: the worst case of a stream."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in data]


def run_stream(tokenizer: Tokenizer, token_ids: list[int], **sampling) -> tuple[list[str], str]:
    """(text after each token up to the stop, and after finish; the stop string or "")."""
    stream = TextStream(tokenizer, SamplingParams(max_tokens=1000, **sampling))
    texts = []
    for token_id in token_ids:
        delta = stream.push(token_id)
        texts.append(delta.text)
        if delta.stopped:
            assert delta.stop_string in sampling["stop"]
            assert stream.finish() == ""
            return texts, delta.stop_string
    return [*texts, stream.finish()], ""


def expected_text(text: str, stops: tuple[str, ...], includes_stop: bool) -> str:
    """The specification: text up to the first end of a stop string, the longest that ends there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if includes_stop else end - max(map(len, found))]
    return text


# Characters


def test_streamed_text_equals_all_tokens_decoded(smollm2):
    for text in nasty_texts(200):
        ids = smollm2.encode_plain(text)
        deltas, _ = run_stream(smollm2, ids)
        assert "".join(deltas) == smollm2.decode(ids)
        assert not any("\ufffd" in delta for delta in deltas)


@settings(deadline=None)
@given(data=st.data())
def test_any_tokens_stream_to_their_decoded_text(tokenizer, data):
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size), max_size=40))
    skip = data.draw(st.booleans())
    deltas, _ = run_stream(tokenizer, ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(ids, skip)


@settings(deadline=None)
@given(garbage=st.binary(max_size=40) | st.text(max_size=10).map(str.encode))
def test_bytes_that_are_no_utf8_come_out_as_in_the_full_text(tokenizer, garbage):
    deltas, _ = run_stream(tokenizer, byte_token_ids(tokenizer, garbage))
    assert "".join(deltas) == garbage.decode("utf-8", errors="replace")


@pytest.mark.parametrize("text", ["👨‍👩‍👧‍👦", "한국어", "中文", "🇺🇸é", "e\u0301"])
def test_a_character_comes_with_its_last_byte(tokenizer, text):
    deltas, _ = run_stream(tokenizer, byte_token_ids(tokenizer, text.encode()))
    expected = []
    for char in text:
        expected += [""] * (len(char.encode()) - 1) + [char]
    assert deltas == [*expected, ""]


def test_cut_character_at_the_end_is_one_replacement(tokenizer):
    deltas, _ = run_stream(tokenizer, byte_token_ids(tokenizer, "a👋".encode()[:-1]))
    assert deltas == ["a", "", "", "", "\ufffd"]


def test_special_token_inside_a_character_does_not_break_it(smollm2):
    first, *rest = smollm2.encode_plain("\U00013000")
    deltas, _ = run_stream(smollm2, [first, 2, *rest])
    assert "".join(deltas) == "\U00013000"


def test_cost_per_token_does_not_grow_with_the_answer(smollm2):
    stream = TextStream(smollm2, SamplingParams(max_tokens=10**6, stop=("never", "eeeee!")))
    ids = smollm2.encode_plain("eeee 你 text " * 100)

    def seconds() -> float:
        start = time.perf_counter()
        for token_id in ids:
            stream.push(token_id)
        return time.perf_counter() - start

    first = min(seconds() for _ in range(3))
    for _ in range(60):
        last = seconds()
    last = min([last, *(seconds() for _ in range(5))])
    assert last < 10 * first  # 60 times the text: a re-decode of the answer would take 60 times


# Stop strings


def test_nothing_of_a_stop_string_is_emitted(smollm2):
    ids = byte_token_ids(smollm2, b"ABCDEFGHIJKLM")
    deltas, stop = run_stream(smollm2, ids, stop=("DEFGHIJ",))
    assert deltas == ["A", "B", "C", "", "", "", "", "", "", ""]
    assert stop == "DEFGHIJ"


def test_included_stop_string_is_emitted_without_delay(smollm2):
    ids = byte_token_ids(smollm2, b"ABCDEFGHIJKLM")
    deltas, _ = run_stream(smollm2, ids, stop=("DEF",), include_stop_str_in_output=True)
    assert deltas == ["A", "B", "C", "D", "E", "F"]


def test_text_that_did_not_become_a_stop_string_comes_out(smollm2):
    deltas, _ = run_stream(smollm2, byte_token_ids(smollm2, b"xabab"), stop=("abac", "bb"))
    assert deltas == ["x", "", "", "", "ab", "ab"]  # the second "ab" could have begun it again


@pytest.mark.parametrize(
    ("text", "stops", "kept", "stop"),
    [
        ("xabc", ("abc", "ab"), "x", "ab"),  # the one that is complete first
        ("xabcd", ("bc", "abcd"), "xa", "bc"),
        ("xabc", ("c", "bc", "abc"), "x", "abc"),  # the longest at the same end
        ("aaab", ("aab",), "a", "aab"),
        ("一👋二", ("👋",), "一", "👋"),
        ("\n\nUser: x", ("\nUser:",), "\n", "\nUser:"),
        ("q" + "z" * 41, ("z" * 40,), "q", "z" * 40),
        ("nothing", ("thong", "gg"), "nothing", ""),
    ],
)
@pytest.mark.parametrize("by_bytes", [True, False])
def test_stop_strings(smollm2, text, stops, kept, stop, by_bytes):
    ids = byte_token_ids(smollm2, text.encode()) if by_bytes else smollm2.encode_plain(text)
    deltas, found = run_stream(smollm2, ids, stop=stops)
    assert ("".join(deltas), found) == (kept, stop)


@settings(deadline=None)
@given(
    text=st.text("ab<é👋", max_size=30),
    stops=st.lists(st.text("ab<é👋", min_size=1, max_size=5), max_size=4),
    includes_stop=st.booleans(),
)
def test_stop_strings_cut_as_specified_at_any_split(tokenizer, text, stops, includes_stop):
    params = {"stop": tuple(stops), "include_stop_str_in_output": includes_stop}
    ids = tokenizer.encode_plain(text)
    whole = tokenizer.decode(ids)
    for tokens in (ids, byte_token_ids(tokenizer, whole.encode())):
        deltas, _ = run_stream(tokenizer, tokens, **params)
        expected = expected_text(whole, tuple(stops), includes_stop)
        assert "".join(deltas) == expected
        emitted = ""
        for delta in deltas:  # never more than the answer, even for a moment
            emitted += delta
            assert expected.startswith(emitted)


def test_stop_string_may_hold_a_replacement_character(smollm2):
    ids = byte_token_ids(smollm2, "ab👋".encode()[:-1])
    deltas, _ = run_stream(smollm2, ids, stop=("b\ufffd",))
    assert "".join(deltas) == "a"


def test_stop_string_matches_a_special_token_only_where_it_is_text(smollm2):
    ids = [*smollm2.encode_plain("hi"), 2, *smollm2.encode_plain("ho")]
    assert run_stream(smollm2, ids, stop=("<|im_end|>",)) == (["hi", "", "ho", ""], "")
    deltas, _ = run_stream(smollm2, ids, stop=("<|im_end|>",), skip_special_tokens=False)
    assert "".join(deltas) == "hi"


@pytest.mark.parametrize(
    ("min_tokens", "kept"),
    [(0, "x"), (2, "x"), (3, "xabc"), (5, "xabc"), (6, "xabca"), (7, "xabcabx")],
)
def test_stop_string_must_end_behind_min_tokens(smollm2, min_tokens, kept):
    ids = byte_token_ids(smollm2, b"xabcabx")
    deltas, _ = run_stream(smollm2, ids, stop=("ab", "bx"), min_tokens=min_tokens)
    assert "".join(deltas) == kept


def test_stop_string_may_overlap_one_that_came_too_early(smollm2):
    ids = byte_token_ids(smollm2, b"ababa")
    deltas, _ = run_stream(smollm2, ids, stop=("aba",), min_tokens=3)
    assert deltas == ["", "", "ab", "", ""]


def test_tokens_after_a_stop_string_add_nothing(smollm2):
    stream = TextStream(smollm2, SamplingParams(stop=("b",)))
    deltas = [stream.push(i) for i in byte_token_ids(smollm2, b"abab")]
    assert [(d.text, d.stopped, d.stop_string) for d in deltas] == [
        ("a", False, None), ("", True, "b"), ("", True, "b"), ("", True, "b"),
    ]  # fmt: skip
    assert stream.finish() == ""


@pytest.mark.parametrize(("includes_stop", "text"), [(False, "a"), (True, "ab")])
def test_stop_token_is_text_only_if_asked_for(smollm2, includes_stop, text):
    sampling = SamplingParams(include_stop_str_in_output=includes_stop)
    stream = TextStream(smollm2, sampling)
    first, last = byte_token_ids(smollm2, b"ab")
    emitted = stream.push(first).text + stream.push(last, is_stop_token=True).text
    assert emitted + stream.finish() == text
