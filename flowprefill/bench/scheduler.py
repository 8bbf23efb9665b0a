"""`flowprefill bench scheduler`: what decisions cost, and how few there are. No model, no torch.

Two parts: the time of Scheduler.decide() while 1,000 and 10,000 requests wait (decision_times.py),
and the number of decisions per request on two simulated traces beside that of schedulers which
decide before each step or at every boundary (decision_counts.py). The decision_p99_ms of the JSON
line are CPU time, of the policy and queue for which they are worst.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, Seed
from flowprefill.bench.report import describe_run, print_json
from flowprefill.config import EngineConfig
from flowprefill.metrics import percentile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flowprefill.bench.decision_counts import DecisionCounts
    from flowprefill.bench.decision_times import Case, DecisionTimes
    from flowprefill.workload import TraceRequest

TRACES = Path(__file__).parents[2] / "clients" / "traces"
CHAT_TRACE = "qwentrace_like_synthetic_10min.csv"
LONG_TRACE = "mooncake_conversation_15min.csv"


def run(
    decisions: Annotated[
        int, typer.Option(min=1, help="Timed decisions of each policy and queue.")
    ] = 500,
    waiting: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Waiting requests; may be repeated. Default: 1000 and 10000."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=2, help="First requests of each trace; default: all.")
    ] = None,
    traces: Annotated[Path, typer.Option(help="Folder of the two traces.")] = TRACES,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Time decisions while many requests wait; count them on simulated traces."""
    from rich.console import Console

    from flowprefill.workload import read_trace, window

    chat, long = (read_trace(traces / name) for name in (CHAT_TRACE, LONG_TRACE))
    chat, long = (window(trace, 0, requests or len(trace)) for trace in (chat, long))
    progress = Console(stderr=True)
    times = measure_times(waiting or [1000, 10_000], chat, decisions, seed, progress)
    counts = measure_counts(chat, long, progress)
    console = Console()
    result = {**summarise_times(times), **summarise_counts(counts)}
    console.print(times_table(result["decision_times"]))
    console.print(counts_table(counts))
    facts = describe_run(EngineConfig(model="none"), seed)
    run_facts = {key: facts[key] for key in ("cpu", "cpus", "seed", "commit")}
    run_facts |= {"decisions": decisions, "policy_of_counts": EngineConfig.policy}
    print_json({**result, "run": run_facts}, json_out)


def measure_times(
    waiting: Iterable[int],
    requests: Sequence[TraceRequest],
    num_decisions: int,
    seed: int,
    console: Console,
) -> dict[Case, DecisionTimes]:
    """Every policy on every kind of queue; shows progress on `console`."""
    from rich.progress import Progress

    from flowprefill.bench.decision_times import DEADLINES, MIXES, Case, time_decisions
    from flowprefill.scheduler.policy import POLICIES

    kinds = itertools.product(waiting, POLICIES, DEADLINES, MIXES)
    cases = [Case(policy, n, deadlines, mix) for n, policy, deadlines, mix in kinds]
    times = {}
    with Progress(console=console, refresh_per_second=2) as progress:
        task = progress.add_task("", total=len(cases))
        for case in cases:
            progress.update(task, description=f"{case.num_waiting} waiting: {case.policy}")
            times[case] = time_decisions(case, requests, num_decisions, seed)
            progress.advance(task)
    return times


def measure_counts(
    chat: Sequence[TraceRequest], long: Sequence[TraceRequest], console: Console
) -> dict[str, DecisionCounts]:
    """By trace: the chats with their output tokens, the long prompts without."""
    from flowprefill.bench.decision_counts import count_decisions, prefill_only

    traces = {"qwentrace_like": chat, "mooncake_prefill_only": prefill_only(long)}
    counts = {}
    with console.status("") as status:
        for name, requests in traces.items():
            status.update(f"counting decisions: {name}")
            counts[name] = count_decisions(requests, EngineConfig.policy)
    return counts


# ---- figures ------------------------------------------------------------------------------------


def summarise_times(times: dict[Case, DecisionTimes]) -> dict[str, Any]:
    """The worst p99 by number of waiting requests; all figures by number and policy."""
    by_number: dict[int, dict[str, dict[str, dict[str, float]]]] = {}
    for case, one in times.items():
        queues = by_number.setdefault(case.num_waiting, {}).setdefault(case.policy, {})
        queues[f"{case.deadlines}, {case.mix}"] = _figures(one)
    result: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for num_waiting, by_policy in by_number.items():
        worst = {policy: _worst(queues) for policy, queues in by_policy.items()}
        details[str(num_waiting)] = worst
        result[f"decision_p99_ms_{num_waiting}"] = max(one["p99_ms"] for one in worst.values())
    return {**result, "decision_times": details}


def _worst(queues: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Figures of one policy: those of the queue with the worst p99, and the p99 of each."""
    name = max(queues, key=lambda queue: queues[queue]["p99_ms"])
    p99_by_queue = {queue: figures["p99_ms"] for queue, figures in queues.items()}
    return {"worst_queue": name, **queues[name], "p99_ms_by_queue": p99_by_queue}


def _figures(times: DecisionTimes) -> dict[str, float]:
    return {
        "p50_ms": _ms(percentile(times.cpu_s, 50)),
        "p99_ms": _ms(percentile(times.cpu_s, 99)),
        "wall_p99_ms": _ms(percentile(times.wall_s, 99)),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 4)


def summarise_counts(counts: dict[str, DecisionCounts]) -> dict[str, Any]:
    """The figures of the chat trace at the top, those of the other by its name."""
    chat, long = counts["qwentrace_like"], counts["mooncake_prefill_only"]
    return {**_count_figures(chat), "mooncake_prefill_only": _count_figures(long)}


def _count_figures(counts: DecisionCounts) -> dict[str, Any]:
    per_step = {f"per_step_{size}": round(n, 3) for size, n in counts.per_step.items()}
    mixed = {f"mixed_steps_{size}": round(n, 3) for size, n in counts.mixed_steps.items()}
    return {
        "decisions_per_request": round(counts.ours, 3),
        "decisions_per_request_per_step": round(counts.per_step[512], 3),
        "decisions_per_request_every_boundary": round(counts.every_boundary, 3),
        "other_schedulers": {**per_step, **mixed},
        "num_requests": counts.num_requests,
        "load": round(counts.load, 4),
        "attainment": round(counts.attainment, 4),
    }


def times_table(details: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """One row per number of waiting requests and policy; details: `decision_times`."""
    from rich.table import Table

    table = Table(title="Scheduler.decide() on the worst queue of each policy, ms")
    table.add_column("waiting", justify="right")
    table.add_column("policy")
    for heading in ("CPU p50", "CPU p99", "wall p99"):
        table.add_column(heading, justify="right")
    table.add_column("queue")
    for num_waiting, by_policy in details.items():
        for index, (policy, one) in enumerate(by_policy.items()):
            cells = [f"{one[key]:.3f}" for key in ("p50_ms", "p99_ms", "wall_p99_ms")]
            last = index == len(by_policy) - 1
            first = "" if index else num_waiting
            table.add_row(first, policy, *cells, one["worst_queue"], end_section=last)
    return table


def counts_table(counts: dict[str, DecisionCounts]) -> Table:
    """One row per trace and scheduler."""
    from rich.table import Table

    table = Table(title="Decisions per request on the same simulated run")
    table.add_column("trace")
    table.add_column("decides on")
    table.add_column("decisions", justify="right")
    table.add_column("ours are fewer by", justify="right")
    for trace, one in counts.items():
        table.add_row(trace, "events: ours", f"{one.ours:.2f}")
        others = {f"steps of {size}": n for size, n in one.per_step.items()}
        others |= {f"mixed steps of {size}": n for size, n in one.mixed_steps.items()}
        others |= {"every boundary": one.every_boundary}
        for name, number in others.items():
            table.add_row("", name, f"{number:.2f}", f"{1 - one.ours / number:.1%}")
        table.add_section()
    return table
