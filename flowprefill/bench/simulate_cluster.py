"""`flowprefill simulate --replicas N`: many replicas behind a router, any number of requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.simulate_plan import Plan, Window, make_window
from flowprefill.bench.simulate_runs import runs_table
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile
from flowprefill.simulator.cluster import Cluster
from flowprefill.simulator.offered import OfferedRequest, repeat
from flowprefill.simulator.replay import Setup, at_load, scaled
from flowprefill.workload import read_trace, window

_SHOWN_EVERY = 1000
"""Requests between two movements of the progress bar."""


@dataclass(frozen=True)
class ClusterPlan:
    """What a cluster adds to a Plan. The plan's load is that of one replica, and its num_requests
    may exceed the trace, which is then repeated."""

    num_replicas: int
    router: str


def run(plan: Plan, cluster_plan: ClusterPlan, slo_scale: float) -> dict[str, Any]:
    """Run all on the beginning of each trace, print a table, return the JSON object.

    slo_scale: times all objectives
    """
    from rich.console import Console

    runs = []
    kinds = [Granularity.parse(kind) for kind in plan.granularities]
    cells = list(itertools.product(plan.traces, plan.policies, kinds))
    with bench_progress(len(cells) * plan.num_requests) as progress:
        for path, policy, granularity in cells:
            names = {"trace": path.stem, "policy": policy, "granularity": str(granularity)}
            progress.describe(" ".join(names.values())[:32])
            setup = Setup(policy, granularity, plan.error, plan.seed, plan.platform)
            started_s = time.perf_counter()
            found = _load_window(plan, path, cluster_plan.num_replicas)
            offered = _offer(found, plan.num_requests, slo_scale, progress)
            cluster = Cluster(setup, cluster_plan.num_replicas, cluster_plan.router)
            cluster.run(offered)
            figures = {"slo_scale": slo_scale, **describe_cluster(cluster)}
            wall_s = round(time.perf_counter() - started_s, 3)
            runs.append({**names, **figures, "num_requests": plan.num_requests, "wall_s": wall_s})
    Console(width=160).print(runs_table(runs, plan.load))
    return {"runs": runs, "replicas": cluster_plan.num_replicas, "router": cluster_plan.router}


def _load_window(plan: Plan, path: Path, num_replicas: int) -> Window:
    """The requests that are repeated, at the rate of the whole cluster."""
    trace = read_trace(path)
    taken = window(trace, 0, min(plan.num_requests, len(trace)))
    found = make_window(plan, trace, taken)
    requests = at_load(found.requests, plan.load * num_replicas, plan.platform)
    return Window(requests, found.objectives)


def _offer(
    found: Window, num_requests: int, slo_scale: float, progress: BenchProgress
) -> Iterable[OfferedRequest]:
    goals = [scaled(goal, slo_scale) for goal in found.objectives]
    return _counted(repeat(found.requests, goals, num_requests), progress)


def _counted(
    offered: Iterator[OfferedRequest], progress: BenchProgress
) -> Iterator[OfferedRequest]:
    while some := list(itertools.islice(offered, _SHOWN_EVERY)):
        yield from some
        progress.advance(len(some))


def describe_cluster(cluster: Cluster) -> dict[str, Any]:
    """The figures of one run, named as those of a replay on one replica."""
    tally, replicas = cluster.tally, cluster.replicas
    ttfts = sorted(tally.ttft_s)
    end_s = cluster.now_s
    busy_s = [replica.counters.busy_s for replica in replicas]
    return {
        "attainment": round(tally.attainment, 4),
        "attainment_by_class": {k: round(v, 4) for k, v in tally.attainment_by_class.items()},
        "requests_by_class": dict(sorted(tally.num_by_class.items())),
        **{f"ttft_p{q}_s": round(percentile(ttfts, q), 4) for q in (50, 90, 99)},
        "ttft_mean_s": round(sum(ttfts) / len(ttfts), 4),
        "tbt_attainment": round(tally.num_gaps_kept / tally.num_ended, 4),
        "preemptions": sum(replica.scheduler.num_preemptions() for replica in replicas),
        "max_preemptions_of_a_request": tally.max_preemptions,
        "evictions": sum(replica.counters.evictions for replica in replicas),
        "decisions": sum(replica.scheduler.num_decisions for replica in replicas),
        "decode_steps": sum(replica.counters.decode_steps for replica in replicas),
        "cached_tokens_share": round(tally.num_cached_tokens / tally.num_prompt_tokens, 4),
        "busy_s": round(sum(busy_s), 3),
        "least_busy_share": round(min(busy_s) / end_s, 4),
        "most_busy_share": round(max(busy_s) / end_s, 4),
        "end_s": round(end_s, 3),
    }
