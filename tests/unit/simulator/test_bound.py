"""The offline bound: never below what can be done, and not above it where all fits."""

from __future__ import annotations

import heapq
import itertools
import math
from fractions import Fraction

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.simulator import bound
from flowprefill.simulator.bound import on_time_bound

Job = tuple[int, int, int]
"""Arrival, deadline, work."""


def jobs(max_size: int) -> st.SearchStrategy[list[Job]]:
    job = st.builds(
        lambda arrival, window, work: (arrival, arrival + window, work),
        st.integers(0, 20),
        st.integers(1, 10),
        st.integers(1, 6),
    )
    return st.lists(job, min_size=1, max_size=max_size)


def bound_of(found: list[Job], weights: list[float] | None = None, num_devices: int = 1) -> float:
    arrivals, deadlines, works = zip(*found, strict=True)
    return on_time_bound(arrivals, deadlines, works, weights, num_devices)


def edf_is_on_time(found: list[Job]) -> bool:
    """Preemptive EDF, which meets all deadlines of a set if any schedule does."""
    waiting: list[list[int]] = []  # [deadline, work left]
    arriving = sorted(found)
    now = 0
    while arriving or waiting:
        if not waiting:
            now = max(now, arriving[0][0])
        while arriving and arriving[0][0] <= now:
            _, deadline, work = arriving.pop(0)
            heapq.heappush(waiting, [deadline, work])
        until = arriving[0][0] if arriving else 10**9
        ran = min(until - now, waiting[0][1])
        now += ran
        waiting[0][1] -= ran
        if now > waiting[0][0]:
            return False
        if not waiting[0][1]:
            heapq.heappop(waiting)
    return True


def best_by_trying_all(found: list[Job], weights: list[float]) -> float:
    return max(
        sum(weights[i] for i in chosen)
        for size in range(len(found) + 1)
        for chosen in itertools.combinations(range(len(found)), size)
        if edf_is_on_time([found[i] for i in chosen])
    )


@settings(max_examples=150, deadline=None)
@given(jobs(8))
def test_bound_is_never_below_the_best_schedule(found: list[Job]) -> None:
    assert bound_of(found) >= best_by_trying_all(found, [1.0] * len(found))


@settings(max_examples=100, deadline=None)
@given(jobs(7), st.data())
def test_weighted_bound_is_never_below_the_best_schedule(
    found: list[Job], data: st.DataObject
) -> None:
    weight = st.integers(0, 5)
    weights = data.draw(st.lists(weight, min_size=len(found), max_size=len(found)))
    best = best_by_trying_all(found, [float(w) for w in weights])
    assert bound_of(found, [float(w) for w in weights]) >= best - 1e-9


def relaxed_optimum(found: list[Job], num_devices: int) -> Fraction:
    """The relaxation as a flow: from each request to the times in its window, exactly."""
    found = [job for job in found if job[2] <= job[1] - job[0]]
    times = sorted({time for arrival, deadline, _ in found for time in (arrival, deadline)})
    scale = math.lcm(*(work for _, _, work in found)) if found else 1
    graph = networkx.DiGraph()
    for index, (arrival, deadline, work) in enumerate(found):
        # What is not served goes around; what is served earns its share of one request.
        graph.add_edge("work", index, capacity=work, weight=-scale // work)
        for start, end in itertools.pairwise(times):
            if arrival <= start and end <= deadline:
                graph.add_edge(index, start + 0.5, weight=0)
                graph.add_edge(start + 0.5, "done", capacity=num_devices * (end - start), weight=0)
    graph.add_edge("work", "done", weight=0)
    total = sum(work for _, _, work in found)
    graph.add_node("work", demand=-total)
    graph.add_node("done", demand=total)
    return Fraction(-networkx.min_cost_flow_cost(graph), scale)


@settings(max_examples=100, deadline=None)
@given(jobs(12), st.integers(1, 2))
def test_bound_is_the_optimum_of_the_relaxation(found: list[Job], num_devices: int) -> None:
    weights = [1.0] * len(found)
    optimum = float(relaxed_optimum(found, num_devices))
    # A weighted bound is not rounded down; deadlines have a tolerance.
    assert bound_of(found, weights, num_devices) == pytest.approx(optimum, abs=1e-4)
    assert bound_of(found, None, num_devices) <= optimum + 1e-4


@settings(max_examples=60, deadline=None)
@given(jobs(10), st.integers(1, 4))
def test_cutting_a_trace_never_lowers_the_bound(found: list[Job], group: int) -> None:
    whole = bound_of(found, [1.0] * len(found))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bound, "MAX_GROUP", group)
        assert bound_of(found, [1.0] * len(found)) >= whole - 1e-9


def test_all_count_where_all_fit() -> None:
    found = [(10 * i, 10 * i + 9, 9) for i in range(50)]
    assert bound_of(found) == 50
    assert bound_of([*found, (0, 10**6, 49)]) == 51
    assert bound_of([*found, (0, 500, 60)]) == 50


def test_a_request_longer_than_its_window_counts_as_none() -> None:
    assert bound_of([(0, 5, 6), (0, 5, 5)]) == 1
    assert bound_of([(0, 5, 6)], [1.0], num_devices=4) == 0


def test_short_requests_are_served_and_long_ones_in_part() -> None:
    assert bound_of([(0, 10, 1)] * 4 + [(0, 10, 12)]) == 4
    assert bound_of([(0, 10, 1)] * 4 + [(0, 10, 8)], [1.0] * 5) == pytest.approx(4.75, abs=1e-4)
    assert bound_of([(0, 10, 6), (0, 10, 8)], [1.0, 9.0]) == pytest.approx(9 + 1 / 3, abs=1e-4)


def test_requests_without_deadline_are_always_on_time() -> None:
    assert on_time_bound([0.0, 0.0, 1.0], [math.inf, 1.0, math.inf], [100.0, 1.0, 100.0]) == 3


def test_thousands_of_overlapping_requests_are_cut_and_still_bounded() -> None:
    rng = np.random.default_rng(0)
    arrivals = np.sort(rng.uniform(0, 500, 2500))
    works = rng.uniform(0.1, 0.9, 2500)
    found = on_time_bound(arrivals, arrivals + 4, works)
    assert 1200 < found < 2500  # 1250 seconds of work in 504
    # Shortest first in the whole time: an upper bound that is easy to see.
    assert found <= np.searchsorted(np.cumsum(np.sort(works)), 504 + 4) + 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0.0], [1.0], [0.0]), "work must be > 0"),
        (([0.0], [1.0], [1.0], [-1.0]), "weights >= 0"),
        (([0.0], [1.0, 2.0], [1.0]), "1 arrivals, 2 deadlines"),
    ],
)
def test_what_is_no_list_of_requests_is_refused(
    arguments: tuple[list[float], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        on_time_bound(*arguments)


def test_no_requests_are_bounded_by_none() -> None:
    assert on_time_bound([], [], []) == 0
