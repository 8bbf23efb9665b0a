"""Waiting ends on time on a thread of its own, once, whoever else ends it at that moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from flowprefill.admission import Admission
from flowprefill.clock import MonotonicClock, VirtualClock
from flowprefill.errors import QueueFullError
from flowprefill.waiting_room import WaitingRoom

WAIT_S = 10.0
TIMEOUT_S = 1000.0
CLOCK = MonotonicClock()


class TimedOut:
    """Who was timed out, and on which thread."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.req_ids: list[int] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, req_id: int) -> None:
        with self.changed:
            self.req_ids.append(req_id)
            self.threads.add(threading.current_thread())
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


@pytest.fixture
def timed_out() -> TimedOut:
    return TimedOut()


@pytest.fixture
def room(timed_out: TimedOut) -> Iterator[WaitingRoom]:
    room = WaitingRoom(Admission(1000, None, TIMEOUT_S), CLOCK, timed_out)
    yield room
    room.close()


def admit(room: WaitingRoom, req_id: int, left_s: float) -> None:
    """One whose waiting is over in left_s."""
    room.admit(req_id, 10, CLOCK.now_s() - TIMEOUT_S + left_s, prefill_s=0.1)


def test_waiting_ends_with_nobody_calling(room: WaitingRoom, timed_out: TimedOut) -> None:
    admit(room, 1, left_s=0.02)
    timed_out.wait(lambda: timed_out.req_ids == [1])
    assert timed_out.threads == {room._thread}
    assert 1 not in room
    assert not room.leave(1)


def test_one_that_ends_sooner_than_those_before_it_ends_on_time(
    room: WaitingRoom, timed_out: TimedOut
) -> None:
    """The thread sleeps for a longer time already."""
    admit(room, 1, left_s=900.0)
    wait_until_asleep(room)
    admit(room, 2, left_s=0.02)
    timed_out.wait(lambda: timed_out.req_ids == [2])
    assert 1 in room


def test_who_has_left_is_not_timed_out(room: WaitingRoom, timed_out: TimedOut) -> None:
    admit(room, 1, left_s=0.1)
    assert room.leave(1)
    admit(room, 2, left_s=0.2)
    timed_out.wait(lambda: len(timed_out.req_ids) > 0)
    assert timed_out.req_ids == [2]


def test_the_thread_sleeps_without_limit_while_nobody_waits(
    room: WaitingRoom, timed_out: TimedOut
) -> None:
    wait_until_asleep(room)
    assert room._wakes_s is None
    admit(room, 1, left_s=0.01)
    timed_out.wait(lambda: timed_out.req_ids == [1])
    wait_until_asleep(room)
    assert room._wakes_s is None


def test_leaving_late_is_a_timeout_even_if_the_thread_has_not_seen_it(
    timed_out: TimedOut,
) -> None:
    """In virtual time the thread never wakes by itself."""
    clock = VirtualClock(100.0)
    room = WaitingRoom(Admission(10, None, 5.0), clock, timed_out)
    room.admit(1, 10, 100.0, 0.1)
    room.admit(2, 10, 103.0, 0.1)
    clock.advance_to(105.0)
    assert not room.leave(1)
    assert timed_out.req_ids == [1]
    assert room.leave(2)
    room.close()


def test_bounds_are_those_of_admission(timed_out: TimedOut) -> None:
    room = WaitingRoom(Admission(1, None, TIMEOUT_S), CLOCK, timed_out)
    admit(room, 1, left_s=900.0)
    with pytest.raises(QueueFullError):
        admit(room, 2, left_s=900.0)
    assert 2 not in room
    room.close()


def test_after_close_nobody_is_timed_out_by_the_thread(timed_out: TimedOut) -> None:
    room = WaitingRoom(Admission(10, None, TIMEOUT_S), CLOCK, timed_out)
    admit(room, 1, left_s=900.0)
    room.close()
    assert not room._thread.is_alive()
    admit(room, 2, left_s=-1.0)
    room.close()  # again: no effect
    assert timed_out.req_ids == []


def test_each_leaves_or_is_timed_out_never_both(room: WaitingRoom, timed_out: TimedOut) -> None:
    left: list[int] = []

    def come_and_go(first: int) -> None:
        draw = random.Random(first)
        for req_id in range(first, first + 100):
            admit(room, req_id, left_s=draw.choice((0.0, 0.001, 0.003)))
            if draw.random() < 0.8 and room.leave(draw.randint(first, req_id)):
                left.append(req_id)

    threads = [threading.Thread(target=come_and_go, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    timed_out.wait(lambda: len(timed_out.req_ids) + len(left) == 400)
    assert len(set(timed_out.req_ids)) == len(timed_out.req_ids)
    assert left and timed_out.req_ids


def wait_until_asleep(room: WaitingRoom) -> None:
    """Until the thread has done what is due and sleeps."""
    deadline_s = CLOCK.now_s() + WAIT_S
    while True:
        with room._changed:
            due_s = room._admission.next_timeout_s()
            if room._wakes_s == due_s and len(room._changed._waiters) == 1:  # type: ignore[attr-defined]
                return
        assert CLOCK.now_s() < deadline_s
        time.sleep(0.001)
