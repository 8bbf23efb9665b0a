"""`flowprefill simulate` without --table: one run for each trace, policy and granularity."""

from __future__ import annotations

import time
from statistics import mean
from typing import TYPE_CHECKING, Any

from flowprefill.bench.simulate_plan import Plan, take_window
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile
from flowprefill.simulator.measures import bound_fraction, bound_of
from flowprefill.simulator.platform import Platform
from flowprefill.simulator.replay import Replay, Setup, at_load

if TYPE_CHECKING:
    from rich.table import Table


def run(plan: Plan, slo_scale: float) -> dict[str, Any]:
    """Run all on the first window of each trace, print a table, return the JSON object.

    slo_scale: times all objectives
    """
    from rich.console import Console

    runs = []
    for path in plan.traces:
        found = take_window(plan, path, 0)
        requests = at_load(found.requests, plan.load, plan.platform)
        for policy in plan.policies:
            for kind in plan.granularities:
                setup = Setup(policy, Granularity.parse(kind), plan.error, plan.seed, plan.platform)
                started_s = time.perf_counter()
                replay = Replay(requests, setup, slo_scale, objectives=found.objectives).run_all()
                names = {"trace": path.stem, "policy": policy, "granularity": kind}
                figures = {"slo_scale": slo_scale, **describe_replay(replay)}
                wall_s = round(time.perf_counter() - started_s, 3)
                counts = {"num_requests": len(requests), "wall_s": wall_s}
                bound = describe_bound(replay, plan.platform)
                runs.append({**names, **figures, **bound, **counts})
    Console(width=160).print(runs_table(runs, plan.load))
    return {"runs": runs}


def describe_replay(replay: Replay) -> dict[str, Any]:
    """The figures of one run, as they are in the JSON line."""
    records = list(replay.records.values())
    ttfts = [record.ttft_s for record in records]
    num_gaps_kept = sum(record.max_gap_s <= record.arrival.tbt_slo_s for record in records)
    return {
        "attainment": round(replay.attainment, 4),
        "attainment_by_class": {k: round(v, 4) for k, v in replay.attainment_by_class.items()},
        "requests_by_class": dict(sorted(replay.num_by_class.items())),
        **{f"ttft_p{q}_s": round(percentile(ttfts, q), 4) for q in (50, 90, 99)},
        "ttft_mean_s": round(replay.mean_ttft_s, 4),
        "tbt_attainment": round(num_gaps_kept / len(records), 4),
        "blocking_ms": _blocking_ms(replay.blocking_s),
        "preemptions": replay.scheduler.num_preemptions(),
        "max_preemptions_of_a_request": max(record.num_preemptions for record in records),
        "evictions": replay.counters.evictions,
        "decisions": replay.scheduler.num_decisions,
        "decode_steps": replay.counters.decode_steps,
        "cached_tokens_share": round(
            sum(record.num_cached_tokens for record in records)
            / sum(record.arrival.num_prompt_tokens for record in records),
            4,
        ),
        "busy_s": round(replay.counters.busy_s, 3),
        "end_s": round(replay.now_s, 3),
    }


def _blocking_ms(blocking_s: list[float]) -> dict[str, float] | None:
    """None: nobody took the device from another."""
    if not blocking_s:
        return None
    percentiles = {f"p{q}": round(1000 * percentile(blocking_s, q), 3) for q in (50, 90, 99)}
    return {"mean": round(1000 * mean(blocking_s), 3), **percentiles}


def describe_bound(replay: Replay, platform: Platform) -> dict[str, Any]:
    """How many requests any schedule could have served in time at most, and the run's share."""
    bound = bound_of(replay, platform)
    fraction = bound_fraction(replay, bound)
    rounded = None if fraction is None else round(fraction, 4)
    return {"offline_bound": bound, "offline_bound_fraction": rounded}


def runs_table(runs: list[dict[str, Any]], load: float) -> Table:
    """Who was on time, and how often the scheduler acted."""
    from rich.table import Table

    table = Table(title=f"load {load:g}: share on time, TTFT in seconds")
    for heading in ("trace", "policy", "boundaries"):
        table.add_column(heading)
    for heading in ("on time", "of bound", "by class", "p50", "p99", "preemptions", "decisions"):
        table.add_column(heading, justify="right")
    for run in runs:
        by_class = " ".join(f"{k} {v:.2f}" for k, v in run["attainment_by_class"].items())
        table.add_row(
            run["trace"],
            run["policy"],
            run["granularity"],
            f"{run['attainment']:.3f}",
            _share_text(run.get("offline_bound_fraction")),
            by_class,
            f"{run['ttft_p50_s']:.3f}",
            f"{run['ttft_p99_s']:.3f}",
            str(run["preemptions"]),
            str(run["decisions"]),
        )
    return table


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"
