"""The keys that `simulate --table` shares with `bench goodput`: rates, and how cells compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowprefill.bench.crossing import bootstrap
from flowprefill.bench.simulate_plan import Cell, Plan, take_window
from flowprefill.simulator.measures import Measures, max_load_of_any_schedule
from flowprefill.simulator.replay import offered_load
from flowprefill.workload import spread_ticks

_SHARES_OF = {"max_load_90": "max_rate_90", "max_load_90_every_class": "max_rate_90_every_class"}
_COMMON_CHUNK = "chunk:2048"

Loads = Mapping[str, Sequence[float]]
"""Highest load with 90% on time by `policy/granularity`, one for each window."""


def rates_and_ratios(plan: Plan, samples: Mapping[Cell, Measures]) -> dict[str, Any]:
    """Requests per second, means over all windows; and ratios with their 95% intervals: s-edf at
    tile to fcfs with whole prefills, the best policy at tile to its best chunk and to chunk 2,048.
    """
    windows = [(path, seed) for path in plan.traces for seed in range(plan.num_seeds)]
    rates = [_rate_at_load_1(plan, path, seed) for path, seed in windows]
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


def _rate_at_load_1(plan: Plan, path: Path, seed: int) -> float:
    """Requests per second that keep the platform just busy."""
    requests = spread_ticks(take_window(plan, path, seed).requests)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    return len(requests) / span_s / offered_load(requests, plan.platform)


def ratios(loads: Loads) -> dict[str, Any]:
    """Ratios of mean loads, each with the ends of its 95% interval; those that can be had."""
    tiles = [cell for cell in loads if cell.endswith("/tile")]
    result: dict[str, Any] = {}
    if {"s-edf/tile", "fcfs/whole"} <= loads.keys():
        result["ratio_to_fcfs"] = _ratio(loads["s-edf/tile"], loads["fcfs/whole"])
    if not tiles:
        return result
    best = max(tiles, key=lambda cell: float(np.mean(loads[cell])))
    policy = best.partition("/")[0]
    result["best"] = best
    chunks = [cell for cell in loads if cell.startswith(f"{policy}/chunk")]
    if chunks:
        best_chunk = max(chunks, key=lambda cell: float(np.mean(loads[cell])))
        result["ratio_to_own_best_chunk"] = _ratio(loads[best], loads[best_chunk])
    if f"{policy}/{_COMMON_CHUNK}" in loads:
        result["ratio_to_chunk_2048"] = _ratio(loads[best], loads[f"{policy}/{_COMMON_CHUNK}"])
    return result


def _ratio(above: Sequence[float], below: Sequence[float]) -> list[float]:
    def value(indices: Sequence[int]) -> float:
        return sum(above[i] for i in indices) / max(sum(below[i] for i in indices), 1e-9)

    interval = bootstrap(value, len(above), seed=0)
    return [round(v, 4) for v in (value(range(len(above))), *interval)]
