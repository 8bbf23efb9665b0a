"""Granularity: where a running prefill may be left for another task.

A property of how a task is run, not of a policy: every policy works at every granularity.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from flowprefill.errors import ConfigError

Kind = Literal["whole", "chunk", "layer", "op", "tile"]


@dataclass(frozen=True)
class Granularity:
    """Where a prefill may be left.

    whole: never; chunk: after a full pass over `chunk_tokens` tokens; layer and op: after the whole
    prompt went through one layer or one operator group; tile: after one operator group of one tile.
    """

    kind: Kind
    chunk_tokens: int = 0
    """Tokens of one chunk; 0 unless kind is chunk."""

    @staticmethod
    def parse(text: str) -> Granularity:
        """Parse `whole`, `layer`, `op`, `tile` or `chunk:N`. Raises ConfigError."""
        kind, _, count = text.partition(":")
        if kind == "chunk" and count.isdecimal() and int(count) > 0:
            return Granularity("chunk", int(count))
        if text in ("whole", "layer", "op", "tile"):
            return Granularity(text)  # type: ignore[arg-type]
        raise ConfigError(
            f"model.json: granularity={text!r}: must be whole, chunk:N, layer, op or tile"
        )

    def pack_tokens(self, saturation_tokens: int) -> int:
        """Tokens that prompts may have together to be one pass: up to the device's saturation, and
        in chunks one chunk at most, since nobody can interrupt a pass of one."""
        return min(saturation_tokens, self.chunk_tokens or saturation_tokens)

    def chunks(self, num_tokens: int, num_cached_tokens: int) -> list[tuple[int, int]]:
        """The passes over a prompt in chunks, each (num_tokens, num_cached_tokens): cut at
        multiples of chunk_tokens in the prompt, as in the native program."""
        size, first = self.chunk_tokens, num_cached_tokens // self.chunk_tokens + 1
        edges = [num_cached_tokens, *range(first * size, num_tokens, size), num_tokens]
        return [(high, low) for low, high in itertools.pairwise(edges)]

    def __str__(self) -> str:
        return f"chunk:{self.chunk_tokens}" if self.kind == "chunk" else self.kind
