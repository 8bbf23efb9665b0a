"""Attainment: which requests of a load test kept their objectives. Knows no locust and no network.

Moments are seconds of one clock, wherever it starts; durations are milliseconds, as in locust.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Objective:
    """What a request is owed."""

    ttft_ms: float
    """From sending it to its first token."""
    tbt_ms: float
    """Between two tokens."""

    def scaled(self, factor: float) -> Objective:
        """An objective `factor` times as long."""
        return Objective(factor * self.ttft_ms, factor * self.tbt_ms)


@dataclass
class Answer:
    """What has come back of one request."""

    sent_s: float
    token_s: list[float] = field(default_factory=list)
    """When tokens came. Tokens of one message count as one."""
    error: Exception | None = None

    @property
    def ttft_ms(self) -> float | None:
        """None if there is no token."""
        return 1000 * (self.token_s[0] - self.sent_s) if self.token_s else None

    @property
    def tbt_ms(self) -> list[float]:
        """The gaps between its tokens; empty for fewer than two."""
        return [1000 * (b - a) for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    def met_ttft(self, objective: Objective) -> bool:
        """Its first token came in time, and it did not fail."""
        return self.error is None and self.ttft_ms is not None and self.ttft_ms <= objective.ttft_ms

    def met_tbt(self, objective: Objective) -> bool:
        """Each later token came in time, and it did not fail."""
        has_token = self.error is None and bool(self.token_s)
        return has_token and all(gap <= objective.tbt_ms for gap in self.tbt_ms)

    def cut_off(self, now_s: float) -> Answer:
        """The best that could have come of it, had it not been stopped: its next token now."""
        return replace(self, token_s=[*self.token_s, now_s])


@dataclass
class Tally:
    """How many requests of one class did what."""

    num_requests: int = 0
    """Answered, failed, or stopped by the end of the test when they were late already. What is
    stopped while it is in time could have gone either way and is not counted."""
    num_failed: int = 0
    num_ttft_met: int = 0
    num_tbt_met: int = 0
    num_met: int = 0
    """Met both objectives."""

    def add(self, answer: Answer, objective: Objective) -> None:
        """Count a request that was answered or failed."""
        met_ttft, met_tbt = answer.met_ttft(objective), answer.met_tbt(objective)
        self.num_requests += 1
        self.num_failed += answer.error is not None
        self.num_ttft_met += met_ttft
        self.num_tbt_met += met_tbt
        self.num_met += met_ttft and met_tbt

    def add_cut_off(self, answer: Answer, objective: Objective, now_s: float) -> None:
        """Count a request that was stopped at `now_s`, if it was late."""
        at_best = answer.cut_off(now_s)
        if not (at_best.met_ttft(objective) and at_best.met_tbt(objective)):
            self.add(at_best, objective)

    def merge(self, other: Tally) -> None:
        """Add another process's requests."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def share(self, part: int) -> float | None:
        """`part` of its requests, 0 to 1; None if there are none."""
        return part / self.num_requests if self.num_requests else None

    @property
    def attainment(self) -> float | None:
        """Share of the requests that met every objective."""
        return self.share(self.num_met)

    def goodput(self, duration_s: float) -> float | None:
        """Requests per second that met every objective; None for a test of no duration."""
        return self.num_met / duration_s if duration_s > 0 else None
