"""Predictor: how long work will take on the device. Pure; the scheduler knows this protocol."""

from __future__ import annotations

from typing import Protocol


class Predictor(Protocol):
    """Device seconds of work that has not started."""

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Seconds to prefill tokens num_cached_tokens..num_tokens of one prompt."""
        ...

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        """Seconds of a decode step of `num_seqs` sequences with so many cached tokens in all."""
        ...
