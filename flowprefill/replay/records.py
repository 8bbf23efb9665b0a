"""Records: what came of each request of a replay, and what they say together. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowprefill.metrics import RequestTimes, percentile
from flowprefill.replay.plan import PlannedRequest

MAX_SEND_LAG_S = 0.005
"""99th percentile of send lags above which a replay was no replay of its trace."""


@dataclass(frozen=True)
class ReplayRecord:
    """One request, sent and answered. Times are seconds from the start of the replay."""

    planned: PlannedRequest
    sent_s: float
    token_s: tuple[float, ...] = ()
    """When each token was there."""
    error: str | None = None
    """Code and message, if it failed."""
    ended_s: float | None = None
    """When the answer was complete or had failed; None where nobody looked."""
    num_input_tokens: int | None = None
    """Tokens of the prompt by the server's count; None if it gave none."""
    server_ttft_s: float | None = None
    """Arrival at the server to first token by its own clock; None if it did not say."""
    blocking_s: float | None = None
    """See PrefillTiming; None if it was not blocked, or nobody looked."""

    @property
    def send_lag_s(self) -> float:
        """How much later than due it was sent."""
        return self.sent_s - self.planned.due_s

    @property
    def times(self) -> RequestTimes:
        """TTFT counts from when it was sent."""
        goal = self.planned.objective
        return RequestTimes(self.sent_s, self.token_s, goal.ttft_s, goal.tbt_s)

    @property
    def ttft_s(self) -> float:
        """Infinite if it never got a token."""
        return self.times.ttft_s

    @property
    def is_on_time(self) -> bool:
        """Its first token met the TTFT objective, and it did not fail later."""
        return self.error is None and self.ttft_s <= self.planned.objective.ttft_s


def send_lag_p99_s(records: Sequence[ReplayRecord]) -> float:
    """Of one replay: see is_void."""
    return percentile([record.send_lag_s for record in records], 99)


def is_void(lag_p99_s: float) -> bool:
    """Whether a replay with that 99th percentile of send lags was no replay of its trace."""
    return lag_p99_s > MAX_SEND_LAG_S


def send_lag_figures(lag_p99_s: float) -> dict[str, Any]:
    """What a benchmark's JSON says of one replay's send lag."""
    return {"send_lag_p99_ms": round(1000 * lag_p99_s, 3), "void": is_void(lag_p99_s)}


def attainment(records: Sequence[ReplayRecord]) -> float:
    """Share of the requests that were on time. Raises ValueError for none."""
    if not records:
        raise ValueError("attainment of no requests")
    return sum(record.is_on_time for record in records) / len(records)


def by_class(records: Sequence[ReplayRecord]) -> dict[str, list[ReplayRecord]]:
    """Records by SLO class, classes in alphabetical order."""
    ordered = sorted(records, key=lambda r: r.planned.objective.name)
    grouped = itertools.groupby(ordered, key=lambda r: r.planned.objective.name)
    return {name: list(group) for name, group in grouped}


def summarise(records: Sequence[ReplayRecord], duration_s: float) -> dict[str, Any]:
    """Figures of a replay of at least one request, for a JSON line.

    duration_s: over which requests were sent; goodput is requests on time per second of it
    """
    num_on_time = sum(record.is_on_time for record in records)
    gaps = [gap for record in records for gap in record.times.tbt_s]
    errors = Counter(r.error.partition(":")[0] for r in records if r.error)
    lag_p99_s = send_lag_p99_s(records)
    return {
        "num_requests": len(records),
        "attainment": _round(attainment(records)),
        "goodput": _round(num_on_time / duration_s) if duration_s > 0 else None,
        "ttft_s": _percentiles([record.ttft_s for record in records]),
        "tbt_s": _percentiles(gaps) if gaps else None,
        **_server_figures(records),
        "classes": {name: _class_figures(members) for name, members in by_class(records).items()},
        "errors": dict(sorted(errors.items())),
        "send_lag_p99_ms": _round(1000 * lag_p99_s),
        "void": is_void(lag_p99_s),
    }


def _server_figures(records: Sequence[ReplayRecord]) -> dict[str, Any]:
    """TTFT by the server's clock, and how much more the client saw; nothing if it did not say."""
    known = [(r.server_ttft_s, r.ttft_s) for r in records if r.server_ttft_s is not None]
    if not known:
        return {}
    return {
        "server_ttft_s": _percentiles([server_s for server_s, _ in known]),
        "ttft_outside_server_s": _percentiles(
            [client_s - server_s for server_s, client_s in known]
        ),
    }


def _class_figures(records: Sequence[ReplayRecord]) -> dict[str, Any]:
    return {
        "num_requests": len(records),
        "attainment": _round(attainment(records)),
        "ttft_s": _percentiles([record.ttft_s for record in records]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and percentiles; None where they are infinite: not every request got a token."""
    found = {f"p{q}": percentile(values, q) for q in (50, 90, 99)}
    found["mean"] = sum(values) / len(values)
    return {name: _round(v) if v < float("inf") else None for name, v in found.items()}


def _round(value: float) -> float:
    return float(round(value, 4))
