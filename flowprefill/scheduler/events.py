"""What the scheduler is told and what it answers. Plain data; no torch, no clock.

The engine (or the simulator) collects events, calls `Scheduler.decide(now_s, events)` once, and
runs the decision's task until it ends or another event arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Arrival:
    """A request came in. It is known to fit alone (the engine checked max_model_len)."""

    req_id: int
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    ttft_slo_s: float
    tbt_slo_s: float


@dataclass(frozen=True)
class PrefillParked:
    """The running prefill was left at a boundary. State, not a wake-up: it joins other events."""

    task_id: int
    remaining_s: float
    """Predicted device time from the cursor to the first token."""


@dataclass(frozen=True)
class PrefillDone:
    """A prefill produced the first token of each of its requests at `now_s` of the decide call.

    A request that already ended with its first token is followed by a `Finished` in the same batch.
    """

    task_id: int


@dataclass(frozen=True)
class DecodeStepDone:
    """Decode steps gave each of their requests num_steps more tokens.

    A step may be left midway for a prefill, like a prefill; it is reported when it has ended, and
    decisions before that name the step again when it is due.
    """

    req_ids: tuple[int, ...]
    num_steps: int = 1
    """More than one: the step was repeated without a decision."""


@dataclass(frozen=True)
class Finished:
    """A request has ended inside the engine (EOS, length, failure): its blocks may go."""

    req_id: int


@dataclass(frozen=True)
class Cancel:
    """The client is gone, or a stop string matched. Unknown and finished ids are ignored."""

    req_id: int


@dataclass(frozen=True)
class Timer:
    """The time of the last decision's `timer_s` has come."""


@dataclass(frozen=True)
class Drain:
    """No more arrivals will come; run what is there."""


Event: TypeAlias = (
    Arrival | PrefillParked | PrefillDone | DecodeStepDone | Finished | Cancel | Timer | Drain
)


@dataclass(frozen=True)
class PrefillTask:
    """Compute the prompts of one or several requests up to their first tokens."""

    task_id: int
    req_ids: tuple[int, ...]


@dataclass(frozen=True)
class DecodeStep:
    """One more token for each of these requests."""

    req_ids: tuple[int, ...]


@dataclass(frozen=True)
class Decision:
    """What the device does next."""

    task: PrefillTask | DecodeStep | None
    """None = nothing to run; wait for an event."""
    timer_s: float | None = None
    """Call decide again with a Timer at this time if nothing else happened before."""
    repeat_decode: bool = False
    """A DecodeStep may be repeated without a new decision while its requests stay the same and no
    event comes (no prefill waits)."""
    timed_out: tuple[int, ...] = ()
    """Requests dropped from the queue by queue_timeout; the engine answers them UNAVAILABLE."""
