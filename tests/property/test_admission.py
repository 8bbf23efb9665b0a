"""Whatever comes, starts and expires: nobody is lost, nobody leaves twice, the bounds hold."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from flowprefill.admission import Admission
from flowprefill.errors import QueueFullError

TIMEOUT_S = 8.0
PREFILL_S_PER_TOKEN = 0.125


class AdmissionMachine(RuleBasedStateMachine):
    @initialize(max_requests=st.integers(1, 6), max_tokens=st.one_of(st.none(), st.integers(1, 40)))
    def start(self, max_requests: int, max_tokens: int | None) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.admission = Admission(max_requests, max_tokens, TIMEOUT_S)
        self.waiting: dict[int, tuple[int, float]] = {}  # id -> tokens, arrival
        self.num_seen = 0
        self.now_s = 0.0

    @rule(num_tokens=st.integers(1, 50), parsing_s=st.integers(0, 20))
    def submit(self, num_tokens: int, parsing_s: int) -> None:
        req_id = self.num_seen
        self.num_seen += 1
        sum_tokens = self.tokens() + num_tokens
        fits = len(self.waiting) < self.max_requests
        fits = fits and (self.max_tokens is None or sum_tokens <= self.max_tokens)
        arrival_s = self.now_s - parsing_s  # some have waited too long before they come
        request = (req_id, num_tokens, arrival_s, num_tokens * PREFILL_S_PER_TOKEN)
        if fits or not self.waiting:
            self.admission.admit(*request)
            self.waiting[req_id] = num_tokens, arrival_s
        else:
            expected = f"about {self.tokens() * PREFILL_S_PER_TOKEN:.1f} s of prefill"
            with pytest.raises(QueueFullError, match=expected):
                self.admission.admit(*request)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        req_id = data.draw(st.integers(0, self.num_seen))
        assert self.admission.leave(req_id) == (req_id in self.waiting)
        self.waiting.pop(req_id, None)

    @rule(seconds=st.integers(0, 6))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        due = [
            (arrival_s, req_id)
            for req_id, (_, arrival_s) in self.waiting.items()
            if arrival_s + TIMEOUT_S <= self.now_s
        ]
        assert self.admission.expire(self.now_s) == [req_id for _, req_id in sorted(due)]
        for _, req_id in due:
            del self.waiting[req_id]

    @invariant()
    def counts_and_next_timeout_equal_the_model_s(self) -> None:
        assert self.admission.num_waiting == len(self.waiting)
        assert self.admission.num_waiting_tokens == self.tokens()
        arrivals = [arrival_s for _, arrival_s in self.waiting.values()]
        expected = min(arrivals) + TIMEOUT_S if arrivals else None
        assert self.admission.next_timeout_s() == expected

    @invariant()
    def the_bounds_hold_but_for_one_alone(self) -> None:
        assert self.admission.num_waiting <= self.max_requests
        if self.max_tokens is not None and self.admission.num_waiting > 1:
            # A long one that came alone stays; nobody joins it.
            assert self.admission.num_waiting_tokens <= self.max_tokens

    def tokens(self) -> int:
        return sum(num_tokens for num_tokens, _ in self.waiting.values())

    def teardown(self) -> None:
        assert sorted(self.admission.expire(float("inf"))) == sorted(self.waiting)
        assert self.admission.num_waiting == self.admission.num_waiting_tokens == 0


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
