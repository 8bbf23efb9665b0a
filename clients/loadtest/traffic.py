"""Traffic: the classes of requests that users send, and their prompts. Knows no network."""

from __future__ import annotations

import random
from dataclasses import dataclass

from attainment import Objective

_VOCABULARY = (
    "the city water report river plan office year road council bridge money work people time "
    "school part house market line price train winter letter number field station power study "
    "question group system case public order state change point country family history service "
    "local early small large open late first second long new old high low clear given was had "
    "made found took gave said kept built moved asked began showed held turned left and but "
    "with from into over after before under between during about near against"
)
WORDS = _VOCABULARY.split()
"""Each is about one token of most tokenizers."""


@dataclass(frozen=True)
class TrafficClass:
    """One kind of request. Lengths are ranges from which each request draws evenly."""

    name: str
    prompt_words: tuple[int, int]
    task: str
    """What the prompt ends with."""
    output_tokens: tuple[int, int]
    objective: Objective
    slo_class: str | None = None
    """Its class in model.json, sent beside its objectives; None = it has none."""


CHAT = TrafficClass(
    "chat",
    prompt_words=(20, 120),
    task="What would you answer?",
    output_tokens=(16, 32),
    objective=Objective(ttft_ms=250, tbt_ms=100),
    slo_class="chat",
)
SEARCH = TrafficClass(
    "search",
    prompt_words=(300, 600),
    task="Which of these notes answers the question?",
    output_tokens=(8, 24),
    objective=Objective(ttft_ms=1500, tbt_ms=200),
)
DOCUMENT = TrafficClass(
    "document",
    prompt_words=(2000, 4000),
    task="In short:",
    output_tokens=(16, 32),
    objective=Objective(ttft_ms=30_000, tbt_ms=200),
    slo_class="document",
)
CLASSES = (CHAT, SEARCH, DOCUMENT)


@dataclass(frozen=True)
class Generation:
    """A request for one answer."""

    prompt: str
    max_tokens: int
    """Exactly so many are generated."""
    objective: Objective
    slo_class: str | None = None


class Source:
    """Draws the prompts of one user and the lengths of its answers."""

    def __init__(self, traffic: TrafficClass, seed: str | None, prompt_scale: float = 1.0) -> None:
        """seed: the same one draws the same requests; None = new ones each time

        prompt_scale: factor on the lengths of prompts
        """
        self._traffic = traffic
        self._random = random.Random(seed)
        self._prompt_scale = prompt_scale

    def draw(self) -> tuple[str, int]:
        """A prompt, which begins like no other one, and the length of its answer in tokens."""
        num_words = round(self._prompt_scale * self._random.randint(*self._traffic.prompt_words))
        text = " ".join(self._random.choices(WORDS, k=max(1, num_words)))
        return f"{text}. {self._traffic.task}", self._random.randint(*self._traffic.output_tokens)
