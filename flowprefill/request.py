"""The vocabulary shared by client side and engine: Request, SLO, SamplingParams, TokenOutput.

Knows neither torch nor Triton. Everything here crosses the engine socket, so it converts to and
from plain msgpack types (`to_wire` / `from_wire`).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import msgpack

from flowprefill.errors import InvalidParameterError
from flowprefill.sampling_params import SamplingParams

MAX_SLO_S = 86_400.0
MAX_NAME_CHARS = 256
"""Of a class and a tenant."""


class RequestStatus(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = "waiting"  # no KV blocks yet
    RUNNING = "running"  # its prefill is the task that was decided last
    PREEMPTED = "preempted"  # its prefill is parked: cursor, KV and live tensors kept
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(str, enum.Enum):
    """Why a request ended. The first two are what clients see in `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class SLO:
    """Service level objective of one request, and what its class says of it."""

    ttft_s: float
    """Objective for arrival to first token, seconds; in (0, 86,400]."""
    tbt_s: float
    """Objective for the gap between two tokens, seconds; in (0, 86,400]."""
    name: str = ""
    """Its SLO class; "" = none."""
    rank: int = 0
    """Among requests that can be on time, a higher one goes first."""
    weight: float = 1.0
    """Worth of being on time, beside that of other requests; > 0."""

    def __post_init__(self) -> None:
        for name, value in (("ttft_slo_ms", self.ttft_s), ("tbt_slo_ms", self.tbt_s)):
            if not math.isfinite(value) or not 0 < value <= MAX_SLO_S:
                limit = f"finite, > 0 and <= {MAX_SLO_S * 1000:.0f}"
                raise InvalidParameterError(name, value * 1000, limit)


@dataclass(frozen=True)
class Request:
    """One prompt and what its client asked for."""

    req_id: int
    """Internal id, unique in one engine's life; the client's own id never reaches the engine."""
    prompt_token_ids: list[int]
    sampling: SamplingParams
    slo: SLO
    arrival_s: float
    """CLOCK_MONOTONIC seconds at which the server handed the request over."""
    tenant: str = ""
    """Who is charged for its tokens under fair share."""

    @property
    def deadline_s(self) -> float:
        """Latest time of the first token that still meets the TTFT objective."""
        return self.arrival_s + self.slo.ttft_s

    @functools.cached_property
    def digest(self) -> bytes:
        """The same for requests that the engine computes in the same way."""
        hashed = hashlib.blake2b(repr(self.sampling).encode(), digest_size=16)
        hashed.update(msgpack.packb(self.prompt_token_ids))
        return hashed.digest()

    def to_wire(self) -> dict[str, Any]:
        wire = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        wire["sampling"] = self.sampling.to_wire()
        wire["slo"] = dataclasses.astuple(self.slo)
        return wire

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> Request:
        fields = dict(wire)
        fields["sampling"] = SamplingParams.from_wire(fields["sampling"])
        fields["slo"] = SLO(*fields["slo"])
        return Request(**fields)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token at one position."""

    token_id: int
    logprob: float
    rank: int
    """1 = the most likely token."""


@dataclass(frozen=True)
class PrefillTiming:
    """How a request came to its first token, in seconds."""

    started_s: float
    """CLOCK_MONOTONIC time at which the device began with it."""
    device_s: float
    """Device time of the pass that gave the token; requests of a pack share one pass. Work that was
    lost to an eviction is not in it, nor on CUDA what was in flight each time the pass was left."""
    predicted_s: float
    """What that pass was predicted to take when it began."""
    num_cached_tokens: int
    """Prompt tokens found in the KV cache."""
    blocking_s: float | None = None
    """Of one that took the device from others: event into the inbox to its first slice."""


@dataclass(frozen=True)
class TokenOutput:
    """What the engine says about one request after one step: a token, an end, or both.

    Exactly one output of a request carries a `finish_reason`, and it is the last one.
    """

    req_id: int
    token_id: int | None = None
    """The new token; None when the request ends without one (cancel, error)."""
    finish_reason: FinishReason | None = None
    logprob: float | None = None
    """Log-probability of `token_id`, always present with a token."""
    top_logprobs: list[Logprob] = field(default_factory=list)
    """The chosen token first, then the most likely ones, if SamplingParams.logprobs asked."""
    error_code: str | None = None
    error_message: str | None = None
    num_preemptions: int = 0
    token_s: float = 0.0
    """CLOCK_MONOTONIC seconds at which the token was on the host."""
    prefill: PrefillTiming | None = None
    """With the first token only."""
    reject_reason: str | None = None
    """Of an error that is a refusal; see FlowPrefillError."""

    def to_wire(self) -> list[Any]:
        reason = self.finish_reason.value if self.finish_reason else None
        tops = [[t.token_id, t.logprob, t.rank] for t in self.top_logprobs]
        prefill = dataclasses.astuple(self.prefill) if self.prefill else None
        error = [self.error_code, self.error_message, self.reject_reason]
        rest = [self.num_preemptions, self.token_s]
        return [self.req_id, self.token_id, reason, self.logprob, tops, prefill, *error, *rest]

    @staticmethod
    def from_wire(wire: list[Any]) -> TokenOutput:
        req_id, token_id, reason_value, logprob, tops, prefill, *end = wire
        error_code, error_message, reject_reason, num_preemptions, token_s = end
        return TokenOutput(
            req_id,
            token_id,
            FinishReason(reason_value) if reason_value else None,
            logprob,
            [Logprob(*values) for values in tops],
            error_code,
            error_message,
            num_preemptions,
            token_s,
            PrefillTiming(*prefill) if prefill else None,
            reject_reason,
        )
