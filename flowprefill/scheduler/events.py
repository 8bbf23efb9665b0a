"""What the scheduler is told and what it answers. Plain data; no torch, no clock.

The engine (or the simulator) collects events, calls `Scheduler.decide(now_s, events)` once, and
runs the decision's task until it ends or another event arrives.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
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
    rank: int = 0
    """The rank of its SLO class: among requests that can be on time, a higher one goes first."""
    weight: float = 1.0
    """The worth of being on time, of its SLO class; only the policy `goodput` looks at it."""
    tenant: str = ""
    """Who is charged for its tokens under fair share."""
    prefix_keys: tuple[Hashable, ...] = ()
    """One key for each full KV block of the prompt; equal keys mean equal text up to there. Empty:
    the prompt shares nothing."""


@dataclass(frozen=True)
class PrefillParked:
    """The running prefill was left at a boundary. State, not a wake-up: it joins other events."""

    task_id: int
    remaining_s: float
    """Predicted device time from the cursor to the first token."""


@dataclass(frozen=True)
class PrefillDone:
    """A prefill produced the next token of each of its requests at `now_s` of the decide call.

    A request that already ended with that token is followed by a `Finished` in the same batch.
    """

    task_id: int


@dataclass(frozen=True)
class DecodeStepDone:
    """Decode steps gave each of their requests num_steps more tokens.

    A step may be left midway for a prefill, like a prefill; it is reported when it has ended, and
    decisions before that name the step again when it is due.
    """

    req_ids: tuple[int, ...]
    end_s: float
    """When the last of the steps ended."""
    num_steps: int = 1
    """More than one: the step was repeated without a decision."""


@dataclass(frozen=True)
class Finished:
    """A request has ended inside the engine (EOS, length, failure): its blocks may go."""

    req_id: int
    prefix_keys: tuple[Hashable, ...] = ()
    """As in Arrival, for prompt and generated tokens whose KV was written."""


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
    """Compute the prompts of one or several requests, packed, up to their next tokens.

    A request that was evicted while it decoded computes its generated tokens again as well.
    """

    task_id: int
    req_ids: tuple[int, ...]
    """Its live requests. A member that is cancelled leaves; the others' places stay."""


@dataclass(frozen=True)
class DecodeStep:
    """One more token for each of these requests."""

    req_ids: tuple[int, ...]


@dataclass(frozen=True)
class PacedSteps:
    """Decode steps beside a prefill, run without asking the scheduler again.

    At the first boundary at or after `release_s` the prefill is left, the step runs, and the
    prefill goes on; the next step is due `interval_s` after the end of the last. All of it holds
    until an event comes, a member ends, or `max_steps` have run.
    """

    step: DecodeStep
    release_s: float
    interval_s: float
    max_steps: int
    """KV blocks are reserved for so many."""


@dataclass(frozen=True)
class Decision:
    """What the device does next."""

    task: PrefillTask | DecodeStep | None
    """None = nothing to run; wait for an event."""
    timer_s: float | None = None
    """Call decide again with a Timer at this time if nothing else happened before."""
    steps: PacedSteps | None = None
    """Beside a PrefillTask only."""
    max_steps: int = 1
    """A DecodeStep may be run so many times without a new decision while its requests stay the same
    and no event comes (no prefill waits)."""
    evicted: tuple[int, ...] = ()
    """Requests whose KV blocks were taken away: parked prefills start again, a decode step that was
    left midway with one of them is dropped."""
    rejected: tuple[int, ...] = ()
    """Waiting requests that can no longer be on time, under `on_infeasible: reject`."""


def has_end(events: Iterable[Event]) -> bool:
    """Whether a request has ended with these."""
    return any(isinstance(event, Finished) for event in events)


def merge(before: list[Event], after: list[Event]) -> list[Event]:
    """Both, with a repeated decode step counted instead of listed."""
    match before[-1:], after[:1]:
        case [DecodeStepDone(ids, _, count)], [DecodeStepDone(same, end_s, more)] if ids == same:
            return [*before[:-1], DecodeStepDone(ids, end_s, count + more), *after[1:]]
    return [*before, *after]
