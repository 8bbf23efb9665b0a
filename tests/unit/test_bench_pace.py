"""How fast the machine is, and what that does to replays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from flowprefill.bench.pace import MAX_TRIES, Pace, mean_seconds


def pace_of(*seconds: float) -> Pace:
    """A machine whose work takes so long, one time after the other; 2 s at its profile's speed."""
    times: Iterator[float] = iter(seconds)
    return Pace(lambda: next(times), 2.0)


def test_slowdown_is_against_the_profile() -> None:
    assert pace_of(3.0).slowdown() == 1.5


def test_a_replay_is_offered_at_the_speed_before_it() -> None:
    paced = pace_of(3.0, 3.1).replay(lambda slowdown: f"stretched by {slowdown}")
    assert paced.value == "stretched by 1.5"
    assert paced.slowdown == 1.5
    assert paced.drift == pytest.approx(0.1 / 3)


def test_it_is_repeated_until_the_speed_was_steady() -> None:
    paced = pace_of(2.0, 3.0, 3.0, 3.0).replay(lambda slowdown: slowdown)
    assert (paced.value, paced.drift) == (1.5, 0.0)


def test_of_a_machine_that_never_is_the_steadiest_try_counts() -> None:
    seconds = (2.0, 3.0, 2.0, 2.4, 2.0, 4.0)
    assert len(seconds) == 2 * MAX_TRIES
    numbers = iter(range(MAX_TRIES))
    paced = pace_of(*seconds).replay(lambda slowdown: next(numbers))
    assert paced.value == 1
    assert paced.drift == pytest.approx(0.2)


def test_a_void_replay_is_repeated_however_steady_it_was() -> None:
    results = iter(["late", "good", "late"])
    paced = pace_of(2.0, 2.0, 2.0, 3.0, 2.0, 2.0).replay(
        lambda slowdown: next(results), is_void=lambda result: result == "late"
    )
    assert (paced.value, paced.drift) == ("good", 0.5)


def test_if_all_are_void_one_of_them_is_told() -> None:
    numbers = iter(range(MAX_TRIES))
    paced = pace_of(2.0, 2.2, 2.0, 2.0, 2.0, 2.1).replay(
        lambda slowdown: next(numbers), is_void=lambda number: True
    )
    assert paced.value == 1


def test_what_is_measured_stands_still_while_the_speed_is_looked_at() -> None:
    done: list[str] = []

    def work() -> float:
        done.append("look")
        return 2.0

    @contextlib.contextmanager
    def stopped() -> Iterator[None]:
        done.append("stop")
        yield
        done.append("go on")

    Pace(work, 2.0).replay(lambda slowdown: done.append("replay"), stopped)
    assert done == ["stop", "look", "go on", "replay", "stop", "look", "go on"]


def test_work_is_repeated_for_as_long_as_asked() -> None:
    calls: list[None] = []
    assert mean_seconds(lambda: calls.append(None), 0.0) >= 0.0
    assert len(calls) == 1
    calls.clear()
    mean_seconds(lambda: calls.append(None), 0.01)
    assert len(calls) > 1
