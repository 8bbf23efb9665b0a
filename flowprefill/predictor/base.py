"""Predictor: how long work will take on the device. Pure; the scheduler knows this protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Predictor(Protocol):
    """Device seconds of work that has not started, at the granularity at which it will run."""

    @property
    def speed_factor(self) -> float:
        """Measured over profiled seconds, as of now; all predictions include it."""
        ...

    @property
    def saturation_tokens(self) -> int:
        """Prompt tokens in one pass beyond which packing another prompt saves no device time."""
        ...

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Seconds to prefill tokens num_cached_tokens..num_tokens of one prompt."""
        ...

    def packed_prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Seconds of one pass over several prompts, each (num_tokens, num_cached_tokens)."""
        ...

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        """Seconds of a decode step of `num_seqs` sequences with so many cached tokens in all,
        the choice of their tokens included."""
        ...
