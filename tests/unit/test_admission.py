import pytest

from flowprefill.admission import Admission
from flowprefill.errors import QueueFullError


def make_admission(max_requests: int = 4, max_tokens: int | None = None, timeout_s: float = 60.0):
    return Admission(max_requests, max_tokens, timeout_s)


def admit(admission: Admission, req_id: int, num_tokens: int = 10, arrival_s: float = 0.0) -> None:
    admission.admit(req_id, num_tokens, arrival_s, prefill_s=num_tokens / 100)


def test_what_is_over_the_bound_on_requests_is_refused_with_the_numbers():
    admission = make_admission(max_requests=2)
    admit(admission, 1, num_tokens=100)
    admit(admission, 2, num_tokens=220)
    with pytest.raises(QueueFullError) as refusal:
        admit(admission, 3)
    assert str(refusal.value) == (
        "the queue is full (max_waiting_requests=2): 2 requests with 320 prompt tokens wait, about "
        "3.2 s of prefill; try again in 3.2 s"
    )
    assert (admission.num_waiting, admission.num_waiting_tokens) == (2, 320)


def test_what_is_over_the_bound_on_tokens_is_refused_with_the_numbers():
    admission = make_admission(max_tokens=100)
    admit(admission, 1, num_tokens=60)
    admit(admission, 2, num_tokens=40)  # exactly full
    with pytest.raises(QueueFullError, match=r"\(max_waiting_tokens=100, this prompt has 1\): 2 r"):
        admit(admission, 3, num_tokens=1)
    assert admission.leave(1)
    admit(admission, 3, num_tokens=60)


def test_a_prompt_over_the_bound_on_tokens_is_taken_when_nobody_waits():
    admission = make_admission(max_tokens=100)
    admit(admission, 1, num_tokens=5_000)
    with pytest.raises(QueueFullError, match="1 requests with 5000 prompt tokens"):
        admit(admission, 2, num_tokens=1)
    assert admission.leave(1)
    admit(admission, 2, num_tokens=5_000)


def test_a_refused_request_leaves_no_trace():
    admission = make_admission(max_requests=1, timeout_s=5.0)
    admit(admission, 1, arrival_s=2.0)
    with pytest.raises(QueueFullError):
        admit(admission, 2, arrival_s=1.0)
    assert admission.next_timeout_s() == 7.0
    assert not admission.leave(2)


def test_a_request_leaves_once():
    admission = make_admission(timeout_s=5.0)
    admit(admission, 1, arrival_s=1.0)
    assert admission.leave(1)
    assert not admission.leave(1)
    assert admission.expire(100.0) == []
    assert admission.num_waiting == admission.num_waiting_tokens == 0


def test_waiting_ends_at_arrival_plus_the_timeout_in_the_order_of_arrival():
    admission = make_admission(timeout_s=5.0)
    for req_id, arrival_s in ((1, 3.0), (2, 1.0), (3, 2.0)):  # parsing may change the order
        admit(admission, req_id, arrival_s=arrival_s)
    assert admission.next_timeout_s() == 6.0
    assert admission.expire(5.999) == []
    assert admission.expire(7.0) == [2, 3]
    assert not admission.leave(2)
    assert admission.next_timeout_s() == 8.0
    assert admission.expire(9.0) == [1]
    assert admission.next_timeout_s() is None


def test_who_started_before_its_timeout_has_none():
    admission = make_admission(timeout_s=5.0)
    admit(admission, 1, arrival_s=1.0)
    admit(admission, 2, arrival_s=2.0)
    assert admission.leave(1)
    assert admission.next_timeout_s() == 7.0
    assert admission.expire(7.0) == [2]


def test_requests_that_have_left_take_no_memory_while_another_waits():
    admission = make_admission(max_requests=100, timeout_s=1e9)
    admit(admission, 0)
    for req_id in range(1, 10_000):
        admit(admission, req_id, arrival_s=float(req_id))
        assert admission.leave(req_id)
    assert len(admission._arrivals) < 100
    assert admission.expire(1e9) == [0]
