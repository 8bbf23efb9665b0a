from __future__ import annotations

import math
import threading

import pytest

from flowprefill.clock import MonotonicClock, VirtualClock
from flowprefill.inbox import Inbox
from flowprefill.interrupt import Interrupt


def make_inbox() -> tuple[Inbox[str], VirtualClock]:
    clock = VirtualClock(10.0)
    return Inbox(clock, Interrupt(clock)), clock


def test_messages_come_in_order_with_the_time_they_were_put() -> None:
    inbox, clock = make_inbox()
    inbox.put("a")
    clock.advance_to(11.0)
    inbox.put("b")
    clock.advance_to(20.0)
    assert inbox.take() == [(10.0, "a"), (11.0, "b")]


def test_taking_empties_it_and_only_then_is_the_interrupt_no_longer_raised() -> None:
    clock = VirtualClock()
    interrupt = Interrupt(clock)
    inbox: Inbox[str] = Inbox(clock, interrupt)
    assert not interrupt.is_raised and inbox.take() == []
    inbox.put("a")
    inbox.put("b")
    assert interrupt.is_raised
    inbox.take()
    assert not interrupt.is_raised and inbox.take() == []
    inbox.put("c")
    assert interrupt.is_raised and inbox.wait(None)
    assert not interrupt.is_raised


@pytest.mark.parametrize("until_s", [None, 0.0, 10.0, 1e12, math.inf])
def test_wait_returns_all_that_is_there_at_once(until_s: float | None) -> None:
    inbox, _ = make_inbox()
    inbox.put("a")
    inbox.put("b")
    assert inbox.wait(until_s) == [(10.0, "a"), (10.0, "b")]


@pytest.mark.parametrize("until_s", [-math.inf, 0.0, 10.0])
def test_wait_for_a_time_that_is_over_returns_nothing_at_once(until_s: float) -> None:
    inbox, _ = make_inbox()
    assert inbox.wait(until_s) == []


def test_wait_ends_at_its_time_and_not_before() -> None:
    clock = MonotonicClock()
    until_s = clock.now_s() + 0.02
    assert Inbox[str](clock, Interrupt(clock)).wait(until_s) == []
    assert clock.now_s() >= until_s - 0.001  # what a timeout may round away


@pytest.mark.parametrize("until_s", [None, 1e12, math.inf])
def test_a_message_of_another_thread_wakes_the_waiting_one(until_s: float | None) -> None:
    clock = MonotonicClock()
    inbox: Inbox[str] = Inbox(clock, Interrupt(clock))
    received: list[tuple[float, str]] = []
    reader = threading.Thread(target=lambda: received.extend(inbox.wait(until_s)))
    reader.start()
    inbox.put("a")
    reader.join(timeout=10)
    assert not reader.is_alive() and [message for _, message in received] == ["a"]


def test_nothing_is_lost_and_each_writers_order_is_kept() -> None:
    clock = MonotonicClock()
    interrupt = Interrupt(clock)
    inbox: Inbox[tuple[int, int]] = Inbox(clock, interrupt)
    num_writers, num_messages = 4, 500

    def write(writer: int) -> None:
        for i in range(num_messages):
            inbox.put((writer, i))

    writers = [threading.Thread(target=write, args=(i,)) for i in range(num_writers)]
    for thread in writers:
        thread.start()
    received: list[tuple[int, int]] = []
    while len(received) < num_writers * num_messages:
        messages = inbox.wait(MonotonicClock().now_s() + 10)
        assert messages, "messages were lost"
        received += [message for _, message in messages]
    for thread in writers:
        thread.join()
    for writer in range(num_writers):
        assert [i for w, i in received if w == writer] == list(range(num_messages))
    assert not interrupt.is_raised
