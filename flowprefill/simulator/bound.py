"""Offline bound: how many requests any preemptive schedule can serve on time. Pure; numpy only.

Request j arrives at a_j, is on time with its first token by d_j, and takes at least w_j seconds of
device time in between (least_work.py says which). The schedule may know the future, and has room
for any number of parked prefills: KV memory is no limit here.

The relaxation: requests may be served in part. Maximise sum(x_j), 0 <= x_j <= 1, where for every
interval [a, b] from an arrival to a deadline what must run inside fits in,

    sum(w_j * x_j for j with a <= a_j and d_j <= b) <= (b - a) * num_devices.

For x in {0, 1} and one device that is exactly what preemptive schedules can do (Horn 1974;
Dertouzos 1974). With several devices it also lets a request use all of them at once.

No solver is needed. Amounts y_j = w_j * x_j fit if those of any set of requests fit into the union
of its windows, whose length is a submodular function of the set: the y that fit are a polymatroid,
and there the greedy algorithm is optimal for any weights (Edmonds 1970). So requests are taken by
weight per second of work, and each gets as much as still fits: the least room that any interval
around its window has left.

Long traces are cut where no request's window crosses, which changes nothing, and elsewhere after
MAX_GROUP requests. Then every group has the device to itself, its last requests up to their
deadlines. That drops constraints between groups and adds none, so the sum of the groups' optima
still is an upper bound, above the whole trace's by at most the requests whose windows cross a cut:
without them no group's work reaches into the next one's time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

MAX_GROUP = 2000
"""Requests that are looked at together; time grows with the cube, memory with the square."""
TOLERANCE_S = 1e-6
"""By how much a deadline may be missed: times are sums of floats."""

Floats = npt.NDArray[np.float64]


def on_time_bound(
    arrival_s: Sequence[float],
    deadline_s: Sequence[float],
    work_s: Sequence[float],
    weights: Sequence[float] | None = None,
    num_devices: int = 1,
) -> float:
    """Upper bound on the requests on time, or on their weights; one entry per request.

    Without weights a whole number. Requests that do not fit into their own window count as 0.
    deadline_s may be infinite. Raises ValueError for work that is not positive, negative weights,
    and lists of different lengths.
    """
    arrival, deadline, work = (np.asarray(x, float) for x in (arrival_s, deadline_s, work_s))
    worth = np.ones_like(work) if weights is None else np.asarray(weights, float)
    if not arrival.shape == deadline.shape == work.shape == worth.shape:
        raise ValueError(f"{len(arrival)} arrivals, {len(deadline)} deadlines, {len(work)} works")
    if not (np.all(work > 0) and np.all(worth >= 0)):
        raise ValueError("work must be > 0 and weights >= 0")
    deadline = deadline + TOLERANCE_S
    fits = np.flatnonzero(arrival + work <= deadline)
    bound = 0.0
    for group in _groups(arrival[fits], deadline[fits]):
        members = fits[group]
        value = _relaxed_optimum(
            arrival[members], deadline[members], work[members], worth[members], num_devices
        )
        # Whole requests only: each group's optimum is a whole number too.
        bound += value if weights is not None else math.floor(value + TOLERANCE_S)
    return bound


def _groups(arrival: Floats, deadline: Floats) -> Iterator[npt.NDArray[np.intp]]:
    """Indices by arrival, cut where no window crosses and after MAX_GROUP."""
    order = np.argsort(arrival, kind="stable")
    start, last_deadline = 0, -math.inf
    for position, index in enumerate(order):
        if arrival[index] >= last_deadline or position - start == MAX_GROUP:
            if position > start:
                yield order[start:position]
            start, last_deadline = position, -math.inf
        last_deadline = max(last_deadline, deadline[index])
    if len(order):
        yield order[start:]


def _relaxed_optimum(
    arrival: Floats, deadline: Floats, work: Floats, worth: Floats, num_devices: int
) -> float:
    """Optimum of the relaxation; see above."""
    starts, ends = np.sort(arrival), np.sort(deadline)
    # room[i, k]: device time in [starts[i], ends[k]] that nobody has yet; below 0 where the
    # interval is none, and there no window lies.
    room = num_devices * (ends[None, :] - starts[:, None])
    num_starts = np.searchsorted(starts, arrival, side="right")  # not after the arrival
    first_end = np.searchsorted(ends, deadline, side="left")  # not before the deadline
    total = 0.0
    for j in np.argsort(-worth / work, kind="stable"):
        around = room[: num_starts[j], first_end[j] :]
        amount = min(work[j], around.min())
        if amount > 0:
            around -= amount
            total += worth[j] * amount / work[j]
    return total
