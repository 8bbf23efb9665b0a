"""Where attainment falls below a target: which load to measure next, and how sure the answer is.

Pure. Attainment is measured at a few loads, over the same windows of a trace each time; between two
loads it is taken to be linear in the logarithm of the load.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

STEP = 1.1
"""Factor between neighbours on the grid of loads."""
MIN_LOAD, MAX_LOAD = 0.02, 20.0
SINGLE_STEPS = 3
"""Of a search, before it takes longer ones: most guesses are no further off."""

Curve = Mapping[float, float]
"""Attainment by load."""


def snap(load: float) -> float:
    """The nearest load of the grid."""
    return _load(_index(min(max(load, MIN_LOAD), MAX_LOAD)))


def next_load(curve: Curve, guess: float, target: float) -> float | None:
    """The load to measure next; None once the crossing lies between two neighbours.

    guess: a load of the grid; from it single steps, then steps twice as long each, lead past the
    crossing, and halves of the last step back to it
    """
    if guess not in curve:
        return guess
    is_met = curve[guess] >= target
    near = _index(guess)
    for far in _indices_from(near, 1 if is_met else -1):
        if _load(far) not in curve:
            return _load(far)
        if (curve[_load(far)] >= target) != is_met:
            return _halve(curve, near, far, target)
        near = far
    return None


def _indices_from(index: int, direction: int) -> Iterator[int]:
    """Of the grid, to its end in that direction."""
    last = _index(MAX_LOAD if direction > 0 else MIN_LOAD)
    for num_steps in itertools.count():
        if index == last:
            return
        step = 2 ** max(0, num_steps - SINGLE_STEPS + 1)
        index += direction * min(step, abs(last - index))
        yield index


def _halve(curve: Curve, near: int, far: int, target: float) -> float | None:
    """The next load between two indices on whose sides of the target curve says different."""
    while abs(far - near) > 1:
        middle = (near + far) // 2
        if _load(middle) not in curve:
            return _load(middle)
        if (curve[_load(middle)] >= target) == (curve[_load(near)] >= target):
            near = middle
        else:
            far = middle
    return None


def search(
    measure_at: Callable[[float], None], curve: Callable[[], Curve], guess: float, target: float
) -> None:
    """Measure until two neighbours are known between which the target is crossed."""
    while (load := next_load(curve(), guess, target)) is not None:
        measure_at(load)


def _index(load: float) -> int:
    return round(math.log(load) / math.log(STEP))


def _load(index: int) -> float:
    return round(STEP**index, 6)


def crossing(curve: Curve, target: float) -> float:
    """The load up to which every measured one reaches the target, and beyond that the share of the
    way to the next one. Beyond the measured loads nothing is known: if the lowest misses it, one
    step below that; if none does, the highest."""
    loads = sorted(curve)
    last = 0.0
    for load in loads:
        if curve[load] < target:
            if not last:
                return load / STEP
            drop = curve[last] - curve[load]
            share = (curve[last] - target) / drop
            return last * math.exp(share * math.log(load / last))
        last = load
    return last


def bootstrap(
    statistic: Callable[[Sequence[int]], float],
    num_windows: int,
    seed: int,
    num_samples: int = 1000,
) -> tuple[float, float]:
    """95% interval of a statistic of windows, from samples of them with replacement.

    statistic: of indices of windows, some of them several times
    """
    rng = random.Random(seed)
    values = sorted(
        statistic([rng.randrange(num_windows) for _ in range(num_windows)])
        for _ in range(num_samples)
    )
    return values[int(0.025 * num_samples)], values[int(0.975 * num_samples) - 1]
