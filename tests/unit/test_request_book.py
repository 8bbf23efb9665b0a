"""Whatever ends a request, it has one end, counted once, and its id is free again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill.admission import Admission
from flowprefill.clock import VirtualClock
from flowprefill.errors import (
    EngineDeadError,
    FlowPrefillError,
    InvalidParameterError,
    QueueFullError,
)
from flowprefill.executor.sampler import Sampled, SamplingState
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.request_book import LiveRequest, RequestBook
from flowprefill.stats import EngineCounters
from tests.factories import make_request

QUEUE_TIMEOUT_S = 5.0


class Desk:
    """A book in virtual time, and what came out of it."""

    def __init__(self, max_waiting: int = 10) -> None:
        self.clock = VirtualClock(100.0)
        self.counters = EngineCounters()
        self.outputs: list[TokenOutput] = []
        self.timed_out: list[int] = []
        self.book = RequestBook(
            Admission(max_waiting, None, QUEUE_TIMEOUT_S),
            QUEUE_TIMEOUT_S * 1000,
            self.clock,
            self.counters,
            self.outputs.append,
            self.timed_out.append,
            num_preemptions=lambda req_id: 7,
        )

    def admit(self, req_id: int, max_tokens: int = 3) -> LiveRequest:
        """As submit does; returns what the engine thread makes of it."""
        request = make_request(
            10, req_id=req_id, arrival_s=self.clock.now_s(), max_tokens=max_tokens
        )
        self.book.admit(request, prefill_s=0.1)
        return live(request)

    def take_in(self, req_id: int, max_tokens: int = 3) -> None:
        assert self.book.take_in(self.admit(req_id, max_tokens))

    def start(self, req_id: int, max_tokens: int = 3) -> None:
        self.take_in(req_id, max_tokens)
        assert self.book.start(req_id)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now_s() + seconds)

    def ends(self) -> list[tuple[int, FinishReason, str | None]]:
        return [(o.req_id, o.finish_reason, o.error_code) for o in self.outputs if o.finish_reason]

    def counted(self) -> tuple[int, int, int, int, int]:
        """Started, finished, cancelled, rejected (timed out as well), failed."""
        c = self.counters
        return c.started, c.finished, c.cancelled, c.rejected + c.timed_out, c.failed


def live(request: Request) -> LiveRequest:
    state = SamplingState(request.sampling, request.prompt_token_ids, (), seed=0)
    return LiveRequest(request, state, put_s=0.0)


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.book.close()


# ---- tokens -------------------------------------------------------------------------------------


def test_last_token_carries_the_end(desk: Desk) -> None:
    desk.start(1, max_tokens=2)
    assert not desk.book.give_token(1, Sampled(5, -0.5), now_s=101.0)
    assert desk.book.live[1].token_ids[-1] == 5
    assert desk.book.give_token(1, Sampled(6, -0.25), now_s=102.0)
    first, last = desk.outputs
    assert (first.token_id, first.logprob, first.finish_reason) == (5, -0.5, None)
    assert (last.token_id, last.logprob, last.finish_reason) == (6, -0.25, FinishReason.LENGTH)
    assert (first.token_s, first.num_preemptions) == (101.0, 7)
    assert desk.counted() == (1, 1, 0, 0, 0)
    assert desk.counters.generated_tokens == 2
    assert not desk.book.live


# ---- ends without a token -----------------------------------------------------------------------


@pytest.mark.parametrize("has_started", [False, True])
def test_each_way_to_end_is_counted_and_answered_once(desk: Desk, has_started: bool) -> None:
    for req_id in (1, 2, 3):
        (desk.start if has_started else desk.take_in)(req_id)
    desk.book.cancel(1)
    desk.book.reject(2, "too late")
    desk.book.fail(3, FlowPrefillError("broken"))
    for req_id in (1, 2, 3):  # ended: nobody is told again
        desk.book.cancel(req_id)
        desk.book.reject(req_id, "again")
        desk.book.fail(req_id, FlowPrefillError("again"))
    assert desk.ends() == [
        (1, FinishReason.CANCELLED, None),
        (2, FinishReason.ERROR, "UNAVAILABLE"),
        (3, FinishReason.ERROR, "INTERNAL"),
    ]
    assert [o.error_message for o in desk.outputs] == [None, "too late", "broken"]
    assert [o.reject_reason for o in desk.outputs] == [None, "infeasible", None]
    assert desk.counted() == (3, 0, 1, 1, 1)
    assert not desk.book.live


def test_fail_all_includes_those_still_in_the_inbox(desk: Desk) -> None:
    desk.start(1)
    desk.take_in(2)
    desk.admit(3)
    desk.book.fail_all(EngineDeadError("the engine failed"))
    desk.book.fail_all(EngineDeadError("the engine failed"))
    assert desk.ends() == [(i, FinishReason.ERROR, "UNAVAILABLE") for i in (1, 2, 3)]
    assert desk.counted() == (3, 0, 0, 0, 3)


# ---- the queue timeout --------------------------------------------------------------------------


def test_who_waited_too_long_cannot_start(desk: Desk) -> None:
    desk.take_in(1)
    desk.pass_time(QUEUE_TIMEOUT_S)
    assert not desk.book.start(1)
    assert desk.timed_out == [1]
    assert desk.ends() == [(1, FinishReason.ERROR, "UNAVAILABLE")]
    message = "the request did not start within queue_timeout_ms=5000; try again in 0.0 s"
    assert desk.outputs[0].error_message == message
    assert desk.counted() == (1, 0, 0, 1, 0)


def test_who_waited_too_long_hears_how_much_prefill_still_waits(desk: Desk) -> None:
    desk.take_in(1)
    desk.pass_time(QUEUE_TIMEOUT_S / 2)
    for req_id in (2, 3, 4):
        desk.take_in(req_id)  # 0.1 s each
    desk.pass_time(QUEUE_TIMEOUT_S / 2)
    assert not desk.book.start(1)
    assert (desk.outputs[0].error_message or "").endswith("; try again in 0.3 s")


def test_who_has_started_never_times_out_and_may_start_again(desk: Desk) -> None:
    """After an eviction."""
    desk.start(1)
    desk.pass_time(10 * QUEUE_TIMEOUT_S)
    assert desk.book.start(1)
    assert desk.timed_out == [] and desk.outputs == []


@pytest.mark.parametrize("end", ["cancel", "reject", "fail", "fail_all"])
def test_whatever_comes_after_a_timeout_ends_nothing(desk: Desk, end: str) -> None:
    desk.take_in(1)
    desk.pass_time(QUEUE_TIMEOUT_S)
    ends = {
        "cancel": lambda: desk.book.cancel(1),
        "reject": lambda: desk.book.reject(1, ""),
        "fail": lambda: desk.book.fail(1, FlowPrefillError()),
        "fail_all": lambda: desk.book.fail_all(FlowPrefillError()),
    }
    ends[end]()
    assert desk.ends() == [(1, FinishReason.ERROR, "UNAVAILABLE")]
    assert desk.timed_out == [1]
    assert desk.counted() == (1, 0, 0, 1, 0)
    desk.book.forget(1)  # when the engine thread hears of the timeout
    assert not desk.book.live


def test_who_was_timed_out_in_the_inbox_is_not_taken_in(desk: Desk) -> None:
    request = desk.admit(1)
    desk.pass_time(QUEUE_TIMEOUT_S)
    other = desk.admit(2)
    assert desk.book.take_in(other)
    assert desk.book.start(2)  # who looks finds the timeout of 1 as well
    assert desk.timed_out == [1]
    assert not desk.book.take_in(request)
    assert list(desk.book.live) == [2]


# ---- ids ----------------------------------------------------------------------------------------


def test_id_of_an_unfinished_request_is_refused_and_free_after_its_end(desk: Desk) -> None:
    first = desk.admit(1)
    with pytest.raises(InvalidParameterError, match="req_id=1"):
        desk.admit(1)
    assert desk.book.take_in(first)
    with pytest.raises(InvalidParameterError, match="req_id=1"):
        desk.admit(1)
    desk.book.cancel(1)
    desk.take_in(1)
    assert desk.counted()[0] == 2


def test_refused_request_leaves_its_id_free_and_counts_nowhere() -> None:
    desk = Desk(max_waiting=1)
    desk.take_in(1)
    with pytest.raises(QueueFullError):
        desk.admit(2)
    assert desk.book.start(1)
    desk.take_in(2)
    assert desk.counted()[0] == 2
    desk.book.close()
