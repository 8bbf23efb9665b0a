"""What the table compares: the highest load, the tightest objectives, and the mean TTFT.

Loads and scales are on fixed geometric grids and found by bisection, which takes attainment to fall
with the load. All setups see the same requests and the same prediction errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flowprefill.simulator.least_work import offline_bound_on
from flowprefill.simulator.platform import Platform
from flowprefill.simulator.replay import Replay, Setup, Target, arrivals_of, at_load
from flowprefill.workload import Objective, TraceRequest, objective

GRID_STEP = 1.02
LOADS = tuple(0.05 * GRID_STEP**i for i in range(256))
"""0.05 to 7.8: see offered_load."""
SLO_SCALES = tuple(0.02 * GRID_STEP**i for i in range(448))
"""0.02 to 140."""


@dataclass(frozen=True)
class Measures:
    """Of one setup on one window of a trace."""

    max_load_90: float
    """Highest load at which 90% of all requests are on time; 0: not even at the lowest."""
    max_load_90_every_class: float
    """The same with 90% in every SLO class."""
    min_slo_scale_90: float
    """Smallest factor on all objectives with which 90% are on time at the fixed load."""
    mean_ttft_s: float
    """At the fixed load."""
    attainment: dict[str, float]
    """By SLO class, at the fixed load."""
    offline_bound_fraction: float | None = None
    """At the fixed load: requests on time, by those that any schedule can serve in time at most."""


Objectives = Sequence[Objective] | None
"""Of each request; None = workload.objective."""


def measure(
    requests: Sequence[TraceRequest], setup: Setup, load: float, objectives: Objectives = None
) -> Measures:
    """load: the fixed one."""
    max_load, max_load_every_class = max_loads(requests, setup, objectives)
    fixed = at_load(requests, load, setup.platform)
    replay = Replay(fixed, setup, objectives=objectives).run_all()
    return Measures(
        max_load_90=max_load,
        max_load_90_every_class=max_load_every_class,
        min_slo_scale_90=min_slo_scale(fixed, setup, objectives),
        mean_ttft_s=replay.mean_ttft_s,
        attainment=replay.attainment_by_class,
        offline_bound_fraction=bound_fraction(replay, bound_of(replay, setup.platform)),
    )


def bound_of(replay: Replay, platform: Platform) -> int | None:
    """Requests of the replay that any schedule can serve in time at most; None: not known."""
    return offline_bound_on(platform, [record.arrival for record in replay.records.values()])


def bound_fraction(replay: Replay, bound: int | None) -> float | None:
    """Requests on time in a whole replay by the bound; None: there is none, or it is 0."""
    return round(replay.attainment * len(replay.records)) / bound if bound else None


def max_load_of_any_schedule(
    requests: Sequence[TraceRequest], platform: Platform, objectives: Objectives = None
) -> float | None:
    """Highest load at which the offline bound leaves 90% on time; None if there is no bound."""
    goals = objectives or [objective(request) for request in requests]

    def bound(load: float) -> int | None:
        loaded = at_load(requests, load, platform)
        return offline_bound_on(platform, arrivals_of(loaded, goals, platform.block_tokens))

    if bound(LOADS[0]) is None:
        return None
    enough = Target().attainment * len(requests)
    return _load(bisect_last(lambda i: (bound(LOADS[i]) or 0) >= enough, len(LOADS)))


def max_loads(
    requests: Sequence[TraceRequest], setup: Setup, objectives: Objectives = None
) -> tuple[float, float]:
    """Highest loads with 90% on time: of all requests, and of every class."""
    reached_in_every_class: dict[int, bool] = {}

    def reaches(index: int, target: Target) -> bool:
        loaded = at_load(requests, LOADS[index], setup.platform)
        replay = Replay(loaded, setup, target=target, objectives=objectives).run_all()
        reached_in_every_class[index] = replay.reaches(Target(every_class=True))
        return replay.reaches(target)

    def reaches_in_every_class(index: int) -> bool:
        if index in reached_in_every_class:
            return reached_in_every_class[index]
        return reaches(index, Target(every_class=True))

    highest = bisect_last(lambda i: reaches(i, Target()), len(LOADS))
    # Where every class reaches it, all together do too.
    highest_every_class = bisect_last(reaches_in_every_class, highest + 1)
    return _load(highest), _load(highest_every_class)


def min_slo_scale(
    requests: Sequence[TraceRequest], setup: Setup, objectives: Objectives = None
) -> float:
    """Smallest scale with 90% on time; the largest of the grid if there is none."""

    def misses(index: int) -> bool:
        replay = Replay(requests, setup, SLO_SCALES[index], Target(), objectives).run_all()
        return not replay.reaches(Target())

    last_missed = bisect_last(misses, len(SLO_SCALES) - 1)
    return SLO_SCALES[last_missed + 1]


def bisect_last(holds: Callable[[int], bool], num_indices: int) -> int:
    """The last index below num_indices for which `holds`, if it does up to some index and no
    further; -1 if for none."""
    low, high = -1, num_indices  # holds at low, does not at high
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _load(index: int) -> float:
    return LOADS[index] if index >= 0 else 0.0
