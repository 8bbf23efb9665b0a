"""Controls: requests that must give the same bytes whenever they are answered, and whatever by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.soak.asking import AnswerError, Ask, Asker

_PROMPTS = (
    "The capital of France is",
    "A short story about a lighthouse keeper:",
    "Water boils at a temperature of " * 40,
)
_LONG_TOKENS = (1000, 1003)
"""Of prompts of the document class: whoever is more urgent takes their KV blocks."""
_SAMPLINGS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0.8, "seed": 7, "ignore_eos": True},
)
_NUM_TOKENS = 24


class Controls:
    """Each prompt with each sampling, and the first answers."""

    def __init__(self, make_prompt: Callable[[int], str], document: Mapping[str, Any]) -> None:
        """document: the objective of the long ones"""
        prompts = [(prompt, dict[str, Any]()) for prompt in _PROMPTS]
        prompts += [(make_prompt(num_tokens), dict(document)) for num_tokens in _LONG_TOKENS]
        self.asks = [
            Ask(prompt, _NUM_TOKENS, sampling, slo)
            for prompt, slo in prompts
            for sampling in _SAMPLINGS
        ]
        self.long = range(len(_PROMPTS) * len(_SAMPLINGS), len(self.asks))
        """Numbers of those that lose their blocks."""
        self._first: list[str] = []

    async def learn(self, asker: Asker) -> None:
        """The first answer of each, one at a time. Raises BenchmarkError."""
        for number, ask in enumerate(self.asks):
            try:
                self._first.append((await asker.grpc(ask)).text)
            except AnswerError as error:
                raise BenchmarkError(f"control {number} has no answer: {error}") from error

    def fault(self, number: int, text: str) -> str | None:
        """What is wrong with a later answer; None if it is the same."""
        first = self._first[number]
        return None if text == first else f"control {number}: {text!r} instead of {first!r}"
