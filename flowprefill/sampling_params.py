"""SamplingParams under vLLM's names: parsing, coercion, range checks. No torch.

Values may arrive as JSON strings ("0.1", "20", "false"): Triton clients send them so. Unknown
keys, wrong types and out-of-range values raise InvalidParameterError; features that vLLM has and we
do not raise UnsupportedFeatureError unless their value asks for nothing (n=1, null).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen and when the answer ends; names and defaults are vLLM's."""

    max_tokens: int = 16
    """Tokens to generate at most; >= 1."""
    min_tokens: int = 0
    """Tokens before which neither EOS nor a stop token may be chosen; 0..max_tokens."""
    temperature: float = 1.0
    """0 = greedy; in [0, 100]."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 or -1 = off; else >= 1."""
    min_p: float = 0.0
    """In [0, 1]."""
    seed: int | None = None
    """Fixes the draw of this request whatever else runs; None = drawn by the engine."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; not emitted unless include_stop_str_in_output."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    """In [-2, 2]."""
    frequency_penalty: float = 0.0
    """In [-2, 2]."""
    repetition_penalty: float = 1.0
    """In (0, 100]."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit; values in [-100, 100]."""
    logprobs: int | None = None
    """Number of most likely tokens to report per position; None = off; 0..20."""

    @staticmethod
    def from_wire(wire: Mapping[str, Any]) -> SamplingParams:
        fields = dict(wire)
        fields["stop"] = tuple(fields["stop"])
        fields["stop_token_ids"] = tuple(fields["stop_token_ids"])
        return SamplingParams(**fields)
