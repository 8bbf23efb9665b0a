"""When a running pass must be left, in virtual time."""

from __future__ import annotations

import ctypes
import math

import pytest

from flowprefill.clock import VirtualClock
from flowprefill.interrupt import Interrupt


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(10.0)


@pytest.fixture
def interrupt(clock: VirtualClock) -> Interrupt:
    return Interrupt(clock)


def test_nothing_is_due_until_something_happens(interrupt: Interrupt, clock: VirtualClock) -> None:
    interrupt.begin_stretch()
    clock.advance_to(1e12)
    assert not interrupt.is_due() and not interrupt.must_leave()


def test_raised_stays_raised_until_it_is_cleared(interrupt: Interrupt) -> None:
    interrupt.begin_stretch()
    interrupt.raise_now()
    interrupt.begin_stretch()  # the next pass does not forget it
    assert interrupt.is_raised and interrupt.is_due() and interrupt.must_leave()
    interrupt.clear()
    assert not interrupt.is_raised and not interrupt.is_due() and not interrupt.must_leave()


def test_the_timer_is_due_at_its_time(interrupt: Interrupt, clock: VirtualClock) -> None:
    interrupt.timer_s = 12.0
    interrupt.begin_stretch(until_s=20.0)
    clock.advance_to(11.9)
    assert not interrupt.is_due() and not interrupt.must_leave()
    clock.advance_to(12.0)
    assert interrupt.is_due() and interrupt.must_leave()
    interrupt.timer_s = math.inf
    assert not interrupt.is_due()


def test_the_end_of_a_pass_time_is_no_event(interrupt: Interrupt, clock: VirtualClock) -> None:
    interrupt.timer_s = 20.0
    interrupt.begin_stretch(until_s=12.0)
    clock.advance_to(12.0)
    assert interrupt.must_leave() and not interrupt.is_due()
    interrupt.begin_stretch()  # the next pass has no such time
    assert not interrupt.must_leave()


def test_kernels_see_what_the_executor_sees(interrupt: Interrupt) -> None:
    """Layout of native/src/slices.h: a flag of 32 bits, then, aligned, a time in seconds."""

    def seen() -> tuple[int, float]:
        flag = ctypes.c_uint32.from_address(interrupt.address).value
        return flag, ctypes.c_double.from_address(interrupt.address + 8).value

    assert seen() == (0, math.inf)
    interrupt.timer_s = 15.0
    interrupt.begin_stretch(until_s=30.0)
    interrupt.raise_now()
    assert seen() == (1, 15.0)
    interrupt.begin_stretch(until_s=12.5)
    interrupt.clear()
    assert seen() == (0, 12.5)
