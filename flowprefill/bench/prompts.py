"""Prompts of an exact token count, different each time and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from flowprefill.bench.report import BenchmarkError
from flowprefill.config import EngineConfig
from flowprefill.replay.prompts import COMMON_WORDS
from flowprefill.tokenizer import load_tokenizer

_MAX_TRIES = 20


def exact_prompt(encode: Callable[[str], list[int]], num_tokens: int, rng: random.Random) -> str:
    """A text of random words that `encode` turns into exactly `num_tokens` token ids.

    encode: text to token ids, with whatever the tokenizer puts in front of a prompt
    Raises BenchmarkError if none is found, as with a tokenizer that does not know these words.
    """
    known = COMMON_WORDS
    words = rng.choices(known, k=num_tokens)
    for _ in range(_MAX_TRIES):
        text = " ".join(words)
        found = len(encode(text))
        if found == num_tokens:
            return text
        # Words may be several tokens each: go the share of the way that is right on average.
        step = max(1, abs(found - num_tokens) * len(words) // max(found, 1))
        if found > num_tokens:
            del words[-step:]
        else:
            words += rng.choices(known, k=step)
    raise BenchmarkError(f"no prompt of exactly {num_tokens} tokens found with this tokenizer")


def prompt_maker(config: EngineConfig, seed: int) -> Callable[[int], str]:
    """A function from a token count to a new prompt of so many tokens for the model of `config`."""
    tokenizer = load_tokenizer(config)
    rng = random.Random(seed)
    return lambda num_tokens: exact_prompt(tokenizer.encode, num_tokens, rng)
