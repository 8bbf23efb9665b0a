"""`flowprefill simulate`: traces on a simulated A800, every policy at every granularity.

With --table they are measured by the highest load that they can take (simulate_table.py); without,
by one run at one load (simulate_runs.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut
from flowprefill.bench.report import describe_run, print_json
from flowprefill.config import POLICIES, EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity

if TYPE_CHECKING:
    from flowprefill.bench.simulate_table import Plan

CHUNKS = tuple(f"chunk:{size}" for size in (256, 512, 1024, 2048, 4096, 8192))
GRANULARITIES = ("whole", *CHUNKS, "layer", "op", "tile")


def run(
    trace: Annotated[list[Path], typer.Option(help="Trace CSV; repeat for several.")],
    table: Annotated[bool, typer.Option("--table", help="Compare by highest loads.")] = False,
    policies: Annotated[
        str | None, typer.Option(help="Separated by commas; default s-edf, in a table all.")
    ] = None,
    granularities: Annotated[
        str | None, typer.Option(help="Separated by commas; default tile, in a table all.")
    ] = None,
    requests: Annotated[int, typer.Option(min=2, help="Requests of a run.")] = 1000,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of a cell, on windows spread over the trace.")
    ] = 10,
    error: Annotated[
        float, typer.Option(min=0.0, max=0.99, help="Prefills are predicted wrong by up to this.")
    ] = 0.2,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that a request generates at most; 1 = prefill only.")
    ] = 1,
    load: Annotated[
        float,
        typer.Option(min=0.001, help="Prefill seconds offered per second, each prompt alone."),
    ] = 0.7,
    slo_scale: Annotated[
        float, typer.Option(min=0.001, help="Times all objectives; without --table.")
    ] = 1.0,
    json_out: JsonOut = None,
) -> None:
    """Replay traces on a simulated A800 with the real scheduler.

    --load is fixed; a table searches the highest load, and uses the fixed one for the tightest
    objectives and for mean TTFT.
    """
    from flowprefill.bench import simulate_runs, simulate_table

    plan = simulate_table.Plan(
        traces=tuple(trace),
        policies=_split(policies, POLICIES if table else ("s-edf",)),
        granularities=_split(granularities, GRANULARITIES if table else ("tile",)),
        num_seeds=seeds if table else 1,
        num_requests=requests,
        error=error,
        max_output_tokens=output_tokens,
        load=load,
    )
    _check(plan)
    results = simulate_table.run(plan) if table else simulate_runs.run(plan, slo_scale)
    print_json({**results, "run": _describe(plan)}, json_out)


def _split(names: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(names.split(",")) if names else default


def _check(plan: Plan) -> None:
    """Refuse what would fail later, in another process."""
    from flowprefill.workload import read_trace, window

    for name in plan.policies:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r}: must be one of {', '.join(POLICIES)}")
    for kind in plan.granularities:
        Granularity.parse(kind)
    for path in plan.traces:
        window(read_trace(path), 0, plan.num_requests)
    names = [path.stem for path in plan.traces]
    if len(set(names)) < len(names):
        raise ConfigError(f"traces {', '.join(names)}: a name is given twice")


def _describe(plan: Plan) -> dict[str, Any]:
    from flowprefill.simulator.replay import MAX_NUM_SEQS
    from flowprefill.simulator.roofline import A800

    facts = describe_run(EngineConfig(model="Llama-3.1-8B", dtype="bfloat16"), seed=0)
    return {
        **facts,
        "device": f"{A800.name}, simulated",
        "traces": [path.name for path in plan.traces],
        "requests": plan.num_requests,
        "seeds": plan.num_seeds,
        "error": plan.error,
        "output_tokens": plan.max_output_tokens,
        "load": plan.load,
        "max_num_seqs": MAX_NUM_SEQS,
    }
