"""What waits outside the engine process: bounded, in order, and over but once."""

from __future__ import annotations

import pytest

from flowprefill.config import EngineConfig
from flowprefill.errors import QueueFullError
from flowprefill.held_requests import HeldRequests
from flowprefill.request import Request
from flowprefill.retry_after import read_retry_after_s
from tests.factories import make_request


def hold(held: HeldRequests, req_id: int, arrival_s: float = 0.0, num_tokens: int = 10) -> bool:
    return held.add(make_request(num_tokens, req_id=req_id, arrival_s=arrival_s), b"%d" % req_id)


def new(timeout_ms: float = 5_000.0, **bounds: int) -> HeldRequests:
    return HeldRequests(EngineConfig(model="m", queue_timeout_ms=timeout_ms, **bounds))  # type: ignore[arg-type]


def everybody(request: Request) -> bool:
    return True


def test_each_ends_once_and_the_others_keep_their_order() -> None:
    held = new()
    for req_id, arrival_s in ((3, 9.0), (1, 2.0), (2, 9.0), (4, 8.0)):
        hold(held, req_id, arrival_s)
    held.cancel(2)
    assert held.next_due_s() == 7.0
    assert (held.take_cancelled(), held.take_expired(7.0)) == ([2], [1])
    assert (held.take_cancelled(), held.take_expired(7.0)) == ([], [])
    assert 3 in held and 1 not in held and 2 not in held
    assert [packed for _, packed in held.take(lambda one: one.req_id != 3)] == [b"4"]
    assert [request.req_id for request, _ in held.take(everybody)] == [3]
    assert list(held.take(everybody)) == []
    assert held.next_due_s() is None


def test_each_is_asked_about_after_the_one_before_went() -> None:
    held, gone = new(), []
    for req_id in range(3):
        hold(held, req_id)
    for request, _ in held.take(lambda one: not gone):
        gone.append(request.req_id)
    assert gone == [0] and 1 in held and 2 in held


def test_a_timeout_counts_from_the_arrival_and_only_a_nearer_one_needs_a_new_timer() -> None:
    held = new(timeout_ms=1000.0)
    assert hold(held, 1, arrival_s=50.0)
    assert not hold(held, 2, arrival_s=51.0)
    assert hold(held, 3, arrival_s=49.0)
    assert held.next_due_s() == 50.0


def test_too_many_are_refused_with_the_numbers_until_one_goes() -> None:
    held = new(max_waiting_requests=2)
    held.note_prefill(100, 0.5)
    held.note_prefill(10, 0.4)  # of a pack
    hold(held, 1, num_tokens=200)
    hold(held, 2, num_tokens=400)
    with pytest.raises(QueueFullError) as refused:
        hold(held, 3)
    message = str(refused.value)
    assert message.startswith("the queue is full (max_waiting_requests=2): 2 requests with 600 ")
    assert read_retry_after_s(message) == 3.0
    held.cancel(1)
    hold(held, 3)
    assert 3 in held


def test_too_many_prompt_tokens_are_refused_but_not_of_one_that_waits_alone() -> None:
    held = new(max_waiting_tokens=100)
    hold(held, 1, num_tokens=150)
    with pytest.raises(QueueFullError, match="max_waiting_tokens=100, this prompt has 1"):
        hold(held, 2, num_tokens=1)
