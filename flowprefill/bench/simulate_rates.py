"""The keys that `simulate --table` shares with `bench goodput`: rates, and how cells compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flowprefill.bench.compared import COMMON_CHUNK, best_cell, compared_cells
from flowprefill.bench.crossing import bootstrap
from flowprefill.bench.simulate_plan import Cell, Plan, take_window
from flowprefill.simulator.measures import Measures, max_load_of_any_schedule
from flowprefill.simulator.replay import rate_at_load_1

_SHARES_OF = {"max_load_90": "max_rate_90", "max_load_90_every_class": "max_rate_90_every_class"}

Loads = Mapping[str, Sequence[float]]
"""Highest load with 90% on time by `policy/granularity`, one for each window."""


def rates_and_ratios(plan: Plan, samples: Mapping[Cell, Measures]) -> dict[str, Any]:
    """Requests per second, means over all windows; and ratios with their 95% intervals: s-edf at
    tile to fcfs with whole prefills, the best policy at tile to its best chunk and to chunk 2,048.
    """
    windows = [(path, seed) for path in plan.traces for seed in range(plan.num_seeds)]
    rates = [rate_at_load_1(take_window(plan, *w).requests, plan.platform) for w in windows]
    result: dict[str, Any] = {}
    loads: dict[str, Loads] = {}
    for measure, name in _SHARES_OF.items():
        loads[measure] = {
            f"{policy}/{kind}": [getattr(samples[Cell(*w, policy, kind)], measure) for w in windows]
            for policy in plan.policies
            for kind in plan.granularities
        }
        result[name] = {
            cell: round(float(np.mean(np.multiply(found, rates))), 3)
            for cell, found in loads[measure].items()
        }
    return {**result, **ratios(loads["max_load_90"]), "max_load_90_offline_bound": _bound(plan)}


def _bound(plan: Plan) -> float | None:
    """Highest load with 90% on time that any schedule could take, mean over all windows."""
    windows = [take_window(plan, path, s) for path in plan.traces for s in range(plan.num_seeds)]
    found = [max_load_of_any_schedule(w.requests, plan.platform, w.objectives) for w in windows]
    known = [load for load in found if load is not None]
    return round(float(np.mean(known)), 4) if len(known) == len(found) else None


def ratios(loads: Loads) -> dict[str, Any]:
    """The best cell, and ratios of mean loads, each with the ends of its 95% interval."""
    means = {cell: float(np.mean(found)) for cell, found in loads.items()}
    pairs = compared_cells(means, f"chunk:{COMMON_CHUNK}")
    found = {name: _ratio(loads[above], loads[below]) for name, (above, below) in pairs.items()}
    return {"best": best_cell(means), **found}


def _ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    def value(indices: Sequence[int]) -> float:
        return sum(above[i] for i in indices) / max(sum(below[i] for i in indices), 1e-9)

    interval = bootstrap(value, len(above), seed=0)
    return [round(v, 4) for v in (value(range(len(above))), *interval)]
