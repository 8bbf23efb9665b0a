"""`flowprefill simulate`: traces on a simulated device, every policy at every granularity.

With --table they are measured by the highest load that they can take (simulate_table.py); without,
by one run at one load, on one replica (simulate_runs.py) or on many behind a router
(simulate_cluster.py). --validate compares the simulator with the engine (simulate_validate.py).
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.compared import CHUNK_SIZES
from flowprefill.bench.options import JsonOut, ModelJson, finite, load_config
from flowprefill.bench.report import VOID_EXIT_CODE, describe_run, print_json, print_void
from flowprefill.config import POLICIES, EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity

if TYPE_CHECKING:
    from flowprefill.bench.simulate_cluster import ClusterPlan
    from flowprefill.bench.simulate_plan import Plan
    from flowprefill.simulator.platform import Platform

GRANULARITIES = ("whole", *(f"chunk:{size}" for size in CHUNK_SIZES), "layer", "op", "tile")
CPU_LENGTH_DIVISOR = 8.0
"""A CPU prefills the prompts of most traces at an eighth of their lengths in bearable time."""


def run(
    trace: Annotated[list[Path], typer.Option(help="Trace CSV; repeat for several.")],
    table: Annotated[bool, typer.Option("--table", help="Compare by highest loads.")] = False,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Compare with the engine on this machine, in real time."),
    ] = False,
    plots: Annotated[
        Path | None,
        typer.Option(
            help="Folder for pictures of a sweep over loads and objectives, a few named cells "
            "unless policies or granularities are given."
        ),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(help="JSON file of the first run, slice by slice, for ui.perfetto.dev."),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help="Separated by commas; default s-edf, in a table all.")
    ] = None,
    granularities: Annotated[
        str | None, typer.Option(help="Separated by commas; default tile, in a table all.")
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Requests of a run; a trace that has fewer is repeated, but not for --table, "
            "--plots, --timeline or --validate. Default 1000, to validate 60.",
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of a cell, on windows spread over the trace.")
    ] = 10,
    error: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=0.99,
            callback=finite,
            help="Prefills are predicted wrong by up to this.",
        ),
    ] = 0.2,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a request generates at most; 1 = prefill only.")
    ] = 1,
    load: Annotated[
        float,
        typer.Option(
            min=0.001,
            callback=finite,
            help="Prefill seconds offered per second and replica, each prompt alone.",
        ),
    ] = 0.7,
    loads: Annotated[str, typer.Option(help="Of --validate, separated by commas.")] = "0.4,0.7,1.0",
    slo_scale: Annotated[
        float,
        typer.Option(min=0.001, callback=finite, help="Times all objectives; without --table."),
    ] = 1.0,
    device: Annotated[
        str, typer.Option(help="A800, A100, H100, H200, or this-cpu, which is profiled.")
    ] = "A800",
    model: Annotated[
        str,
        typer.Option(help="Llama-3.1-8B, Qwen2.5-14B or Llama-3.1-70B, with its own objectives."),
    ] = "Llama-3.1-8B",
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Devices of a replica; default: as the model needs.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas behind a router.")] = 1,
    router: Annotated[
        str, typer.Option(help="round-robin, least-load or slack-aware.")
    ] = "least-load",
    length_divisor: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            callback=finite,
            help="Prompts are so many times shorter; 8 on this-cpu, else 1.",
        ),
    ] = None,
    model_json: ModelJson = None,
    seed: Annotated[
        int, typer.Option(help="Of prediction errors, routers, and prompts of --validate.")
    ] = 0,
    json_out: JsonOut = None,
) -> None:
    """Replay traces on a simulated device with the real scheduler.

    --load is fixed; a table searches the highest load, and uses the fixed one for the tightest
    objectives and for mean TTFT. --model-json is that of --device this-cpu. If --validate sent
    requests of a run more than 5 ms late (99th percentile) the comparison is void: exit code 3.
    """
    from flowprefill.bench import simulate_plots
    from flowprefill.bench.simulate_cluster import ClusterPlan
    from flowprefill.bench.simulate_plan import THIS_CPU, Plan, gpu_platform
    from flowprefill.simulator.data_sheets import MODELS

    all_loads = _loads(loads)
    is_cpu = validate or device == THIS_CPU
    config = EngineConfig(model=model, dtype="bfloat16")
    if is_cpu:
        config = load_config(model_json, None)
    if validate:  # as model.json has them
        policies, granularities = policies or config.policy, granularities or config.granularity
    platform = _profile(config) if is_cpu else gpu_platform(device, model, tensor_parallel)
    plan = Plan(
        traces=tuple(trace),
        policies=_split(policies, POLICIES if table else ("s-edf",)),
        granularities=_split(granularities, GRANULARITIES if table else ("tile",)),
        num_seeds=seeds if table or plots else 1,
        num_requests=requests or (60 if validate else 1000),
        error=error,
        max_output_tokens=output_tokens,
        load=load,
        platform=platform,
        model=None if is_cpu else MODELS[model],
        length_scale=1 / (length_divisor or (CPU_LENGTH_DIVISOR if is_cpu else 1.0)),
        seed=seed,
    )
    cluster = ClusterPlan(replicas, router)
    _check_modes(table, validate, plots, timeline, cluster)
    in_full = table or validate or plots is not None or timeline is not None
    _check(plan, table, in_full, cluster)
    started_s = time.perf_counter()
    if validate:
        from flowprefill.bench import simulate_validate

        results = simulate_validate.run(plan, config, all_loads, slo_scale)
    elif plots is not None:
        results = simulate_plots.run(plan, bool(policies or granularities), plots)
    else:
        results = _simulate(plan, table, cluster, slo_scale)
        if timeline is not None:
            simulate_plots.write_timeline(plan, slo_scale, timeline)
    counts = {
        "num_requests": plan.num_requests,
        "wall_s": round(time.perf_counter() - started_s, 3),
    }
    is_void = results.get("void", False)  # of what was replayed, with --validate
    if is_void:
        print_void(results["send_lag_p99_ms"])
    print_json({**results, **counts, "run": _describe(plan, config)}, json_out)
    raise typer.Exit(VOID_EXIT_CODE if is_void else 0)


def _simulate(plan: Plan, table: bool, cluster: ClusterPlan, slo_scale: float) -> dict[str, Any]:
    from flowprefill.bench import simulate_cluster, simulate_runs, simulate_table
    from flowprefill.workload import read_trace

    if table:
        return simulate_table.run(plan)
    shortest = min(len(read_trace(path)) for path in plan.traces)
    if cluster.num_replicas > 1 or plan.num_requests > shortest:
        return simulate_cluster.run(plan, cluster, slo_scale)
    return simulate_runs.run(plan, slo_scale)


def _profile(config: EngineConfig) -> Platform:
    """This machine with the model that `config` names."""
    from flowprefill.bench.progress import bench_progress
    from flowprefill.bench.this_cpu import this_cpu

    with bench_progress(1) as progress:
        platform = this_cpu(config, progress.show_loading)
        progress.advance()
    return platform


def _split(names: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names.split(",")) if names else default


def _loads(text: str) -> list[float]:
    try:
        loads = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--loads {text}: must be numbers separated by commas") from error
    if not all(0 < load < math.inf for load in loads):
        raise ConfigError(f"--loads {text}: must be finite and > 0")
    return loads


def _check_modes(
    table: bool, validate: bool, plots: Path | None, timeline: Path | None, cluster: ClusterPlan
) -> None:
    """Refuse modes that exclude each other."""
    from flowprefill.bench.plotting import check_plots_folder

    if plots is not None:
        check_plots_folder(plots)
        if table or validate or cluster.num_replicas > 1:
            raise ConfigError("--plots has runs of its own: no --table, --validate, --replicas")
    if timeline is not None and (table or validate or plots or cluster.num_replicas > 1):
        raise ConfigError("--timeline is of one run on one replica: no other mode beside it")


def _check(plan: Plan, table: bool, in_full: bool, cluster: ClusterPlan) -> None:
    """Refuse what would fail later, perhaps in another process.

    in_full: a trace must have as many requests as are wanted, as it is not repeated
    """
    from flowprefill.simulator.router import ROUTERS
    from flowprefill.workload import read_trace, window

    for name in plan.policies:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r}: must be one of {', '.join(POLICIES)}")
    for kind in plan.granularities:
        Granularity.parse(kind)
    if cluster.router not in ROUTERS:
        raise ConfigError(f"--router {cluster.router}: must be one of {', '.join(ROUTERS)}")
    if table and cluster.num_replicas > 1:
        raise ConfigError("--table compares single replicas: leave --replicas out")
    for path in plan.traces:
        trace = read_trace(path)
        window(trace, 0, plan.num_requests if in_full else min(plan.num_requests, len(trace)))
    names = [path.stem for path in plan.traces]
    if len(set(names)) < len(names):
        raise ConfigError(f"traces {', '.join(names)}: a name is given twice")


def _describe(plan: Plan, config: EngineConfig) -> dict[str, Any]:
    platform, cell = plan.platform, Granularity.parse(plan.granularities[0])
    return {
        **describe_run(config, plan.seed),
        "device": f"{platform.device_name}, simulated",
        "traces": [path.name for path in plan.traces],
        "requests": plan.num_requests,
        "seeds": plan.num_seeds,
        "error": plan.error,
        "output_tokens": plan.max_output_tokens,
        "load": plan.load,
        "length_scale": plan.length_scale,
        "max_num_seqs": platform.options(cell).max_num_seqs,
    }
