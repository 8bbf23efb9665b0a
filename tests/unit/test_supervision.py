"""The rules of supervision, on hand-made times."""

from __future__ import annotations

import math

import pytest

from flowprefill.supervision import LoadWatch, ProgressWatch, RestartPlan, Supervision

LIMITS = Supervision()


def run_pings(
    watch: ProgressWatch, until_s: float, num_slices: int | None = None, slice_s: float = 0.0
) -> float | None:
    """Ping on time until `until_s`; each pong says num_slices, slice_s. Returns what ended it."""
    while watch.next_ping_s < until_s:
        now_s = watch.next_ping_s
        stalled_s = watch.on_ping_time(now_s)
        if stalled_s is not None:
            return stalled_s
        if num_slices is not None:
            watch.on_pong(num_slices, slice_s, now_s)
    return None


def test_an_engine_without_progress_is_wedged_after_ten_seconds() -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=0.004)
    watch.begin(100.0)
    assert run_pings(watch, until_s=111.0) is None
    assert run_pings(watch, until_s=113.0) == 12.0


def test_pongs_that_count_no_new_slice_are_no_progress() -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=0.004)
    watch.begin(100.0)
    assert run_pings(watch, until_s=200.0, num_slices=7) == 12.0  # from the first pong at 102


def test_new_slices_and_outputs_are_progress() -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=0.004)
    watch.begin(100.0)
    for step in range(1, 20):
        watch.on_pong(step, 0.0, watch.next_ping_s)
        assert run_pings(watch, until_s=100.0 + 4 * step) is None
    for step in range(20, 40):
        watch.on_output(watch.next_ping_s)
        assert run_pings(watch, until_s=100.0 + 4 * step) is None


def test_long_slices_get_twenty_times_their_length() -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=3.0)
    watch.begin(0.0)
    assert run_pings(watch, until_s=61.0) is None
    assert run_pings(watch, until_s=63.0) == 62.0


def test_a_slice_that_is_predicted_to_be_long_gets_twenty_times_its_prediction() -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=0.004)
    watch.begin(0.0)
    watch.on_pong(1, 3.0, 0.0)
    assert run_pings(watch, until_s=61.0, num_slices=1, slice_s=3.0) is None
    assert run_pings(watch, until_s=63.0, num_slices=1, slice_s=3.0) == 62.0


def test_a_long_slice_does_not_lengthen_the_watch_over_the_next_one() -> None:
    for forget in (lambda watch: watch.on_pong(2, 0.001, 4.0), lambda watch: watch.begin(4.0)):
        watch = ProgressWatch(LIMITS, max_slice_s=0.004)
        watch.begin(0.0)
        watch.on_pong(1, 3.0, 2.0)
        forget(watch)
        watch.next_ping_s = 6.0
        assert run_pings(watch, until_s=17.0) == 12.0


@pytest.mark.parametrize(
    ("slice_s", "wedge_s"),
    [(math.nan, 10.0), (-1.0, 10.0), (-math.inf, 10.0), (1e6, 1800.0), (math.inf, 1800.0)],
)
def test_no_prediction_switches_the_watch_off(slice_s: float, wedge_s: float) -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=0.004)
    watch.begin(0.0)
    watch.on_pong(1, slice_s, 0.0)
    stalled_s = run_pings(watch, until_s=2000.0, num_slices=1, slice_s=slice_s)
    assert stalled_s == wedge_s + LIMITS.ping_s


def test_a_watch_that_was_late_itself_does_not_blame_the_engine() -> None:
    watch = ProgressWatch(LIMITS, max_slice_s=0.004)
    watch.begin(100.0)
    assert watch.on_ping_time(500.0) is None
    assert run_pings(watch, until_s=511.0) is None
    assert run_pings(watch, until_s=513.0) == 12.0


def test_backoff_doubles_and_the_fifth_death_in_five_minutes_is_the_last() -> None:
    plan = RestartPlan(LIMITS)
    backoffs = [plan.backoff_after_death_s(10.0 * death) for death in range(5)]
    assert backoffs == [1.0, 2.0, 4.0, 8.0, None]


def deaths_of_ready_engines(load_s: float, ready_s: float) -> list[float | None]:
    """Back-off after each of twenty deaths of engines that loaded and were ready for so long."""
    plan, now_s, backoffs = RestartPlan(LIMITS), 0.0, []
    for _ in range(20):
        plan.note_ready(now_s + load_s)
        now_s += load_s + ready_s
        backoffs.append(plan.backoff_after_death_s(now_s))
    return backoffs


def test_deaths_out_of_the_window_are_forgotten() -> None:
    assert deaths_of_ready_engines(load_s=1.0, ready_s=301.0) == [1.0] * 20
    assert deaths_of_ready_engines(load_s=0.0, ready_s=200.0) == [1.0] + [2.0] * 19


def test_deaths_in_a_row_without_an_engine_that_loaded_count_whatever_their_age() -> None:
    plan = RestartPlan(LIMITS)
    plan.note_ready(0.0)
    backoffs = [plan.backoff_after_death_s(1000.0 + 200.0 * death) for death in range(5)]
    assert backoffs == [1.0, 2.0, 4.0, 8.0, None]


def test_an_engine_that_loads_for_long_and_dies_at_once_is_given_up_too() -> None:
    assert deaths_of_ready_engines(load_s=200.0, ready_s=1.0)[:5] == [1.0, 2.0, 4.0, 8.0, None]


def test_backoff_is_at_most_thirty_seconds() -> None:
    plan = RestartPlan(Supervision(max_deaths=100))
    assert [plan.backoff_after_death_s(float(death)) for death in range(7)][-2:] == [30.0, 30.0]


def test_only_an_engine_that_restarts_has_to_load_within_a_limit() -> None:
    watch = LoadWatch(LIMITS)
    watch.begin(100.0)
    assert watch.due_s is None
    watch.end()
    watch.note_first(130.0)
    assert watch.due_s is None
    watch.begin(1000.0)
    assert watch.due_s == 1150.0  # five times the first load
    watch.end()
    assert watch.due_s is None


def test_a_restart_may_load_for_a_minute_however_quick_the_first_load_was() -> None:
    watch = LoadWatch(LIMITS)
    watch.begin(0.0)
    watch.note_first(0.5)
    watch.begin(10.0)
    assert watch.due_s == 70.0
