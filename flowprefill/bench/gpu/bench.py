"""`flowprefill bench gpu-bench`: our figures on a CUDA card, in a few minutes.

A model of random weights with the shapes of Llama-3.1-8B in bf16: prefill beside torch's attention
in transformers, what slicing costs, blocking times at each granularity and with a synchronise
behind each operator, decode steps, what parked prefills hold, and policies on a stretch of a trace.
Without a card the same stages run on a tiny model on the CPU: a dry run, whose figures mean
nothing.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.bars import add_bars, bar_table
from flowprefill.bench.gpu.report import DRY_RUN, find_bars, make_tables
from flowprefill.bench.gpu.shapes import LLAMA_3_1_8B, TINY
from flowprefill.bench.gpu.stages import Budget, Stages
from flowprefill.bench.options import JsonOut, Seed, finite
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, print_json

if TYPE_CHECKING:
    from flowprefill.bench.bars import Bar
    from flowprefill.bench.gpu.goodput import TraceSizes
    from flowprefill.bench.gpu.measure import Sizes
    from flowprefill.bench.gpu.random_model import RandomModel
    from flowprefill.bench.gpu.reference import Reference
    from flowprefill.programs.weights import OnProgress

SHARES = {"prefill": 110.0, "blocking": 180.0, "decode": 25.0, "parked": 5.0, "goodput": 110.0}
"""Of the time, by stage."""
DEFAULT_TRACE = "qwentrace_like_synthetic_10min.csv"
_HEADROOM_BYTES = 10 * 10**9
"""Of a card, for activations of a whole prompt and the reference's own KV cache."""
_DRY_SECONDS = 45.0


def run(
    seconds: Annotated[
        float,
        typer.Option(min=1, callback=finite, help="For all of it, loading and compiling included."),
    ] = 480.0,
    max_slice_ms: Annotated[
        float,
        typer.Option(
            min=0.01,
            callback=finite,
            help="As in model.json; blocking is up to 1.5 times that.",
        ),
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option(help=f"Trace CSV; default: {DEFAULT_TRACE} beside the source tree."),
    ] = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure prefill, blocking, slicing, decode and goodput on a CUDA card; without one a dry run
    that measures nothing. Exit code 1: a stage failed, or a bar is missed."""
    import torch
    from rich.console import Console

    is_dry_run = not torch.cuda.is_available()
    console, errors = Console(width=150), Console(stderr=True, highlight=False)
    if is_dry_run:
        console.rule(DRY_RUN)
        seconds = min(seconds, _DRY_SECONDS)
    start_s = time.monotonic()
    with bench_progress(None) as progress:
        random_model = load(is_dry_run, max_slice_ms, seed, progress.show_loading)
        facts = _facts(random_model, is_dry_run, seed)
        loading_s = time.monotonic() - start_s
        stages = Stages(seconds - loading_s, SHARES, facts, json_out, errors.print, is_dry_run)
        stages.seconds["loading"] = round(loading_s, 1)
        stages.write()
        run_stages(stages, random_model, _trace(trace), seed, progress)
    bars = find_bars(stages.figures, _sizes(is_dry_run).longest, is_dry_run)
    print_json(_report(stages, bars, is_dry_run, console), json_out)
    if stages.failed or not all(bar.is_met for bar in bars):
        raise typer.Exit(1)


def load(is_dry_run: bool, max_slice_ms: float, seed: int, on_progress: OnProgress) -> RandomModel:
    """The model, on the card with as much KV cache as is wanted, or as there is room for."""
    from flowprefill.bench.gpu.random_model import profiled_random_model

    sizes = _sizes(is_dry_run)
    longest = sizes.longest
    settings: dict[str, Any] = {"max_slice_ms": max_slice_ms, "max_model_len": longest + 64}
    settings |= {"max_num_seqs": max(sizes.batches)}
    if is_dry_run:
        # the operators that those of a card are made of
        settings |= {"device": "cpu", "dtype": "float32", "kernels": "torch"}
        settings |= {"num_threads": 1, "kv_cache_memory_bytes": 2**23}
    else:
        settings |= {"device": "cuda", "dtype": "bfloat16"}
        settings |= {"kv_cache_memory_bytes": _kv_cache_bytes(longest)}
    shapes = TINY if is_dry_run else LLAMA_3_1_8B
    with tempfile.TemporaryDirectory(prefix="flowprefill-") as folder:
        return profiled_random_model(shapes, settings, Path(folder), seed, on_progress)


def _kv_cache_bytes(longest: int) -> int:
    """Room for the parked prefills, or what the card has beside weights and headroom.

    Raises BenchmarkError if one prompt of the longest has no room.
    """
    import torch

    from flowprefill.bench.gpu.random_model import kv_bytes, weight_bytes
    from flowprefill.simulator.data_sheets import LLAMA_3_1_8B as SPEC

    free, _ = torch.cuda.mem_get_info()
    room = free - weight_bytes(SPEC, torch.bfloat16) - _HEADROOM_BYTES
    least = kv_bytes(SPEC, torch.bfloat16, longest + 256)
    if room < least:
        needed = (free - room + least) / 1e9
        raise BenchmarkError(f"the card has {free / 1e9:.0f} GB free; {needed:.0f} are needed")
    return min(room, kv_bytes(SPEC, torch.bfloat16, (_sizes(False).parked + 1) * longest))


def run_stages(
    stages: Stages,
    random_model: RandomModel,
    trace: Path | None,
    seed: int,
    progress: BenchProgress,
) -> None:
    """All of them, in an order in which the bars come first."""
    from flowprefill.bench.gpu import measure
    from flowprefill.bench.gpu.goodput import measure_goodput

    is_dry_run = random_model.model.device.torch_device.type == "cpu"
    sizes = _sizes(is_dry_run)

    def run_prefill(budget: Budget) -> dict[str, Any]:
        reference = _reference(random_model, is_dry_run, budget)
        return measure.measure_prefill(random_model, reference, sizes, seed, progress, budget)

    def run_goodput(budget: Budget) -> dict[str, Any]:
        if trace is None:
            budget.cut(f"goodput: there is no {DEFAULT_TRACE} here, name one with --trace")
            return {}
        some = _trace_sizes(is_dry_run)
        return measure_goodput(random_model, trace, some, seed, progress, budget)

    stages.run("prefill", run_prefill)
    on_model = random_model, sizes, seed, progress
    stages.run("blocking", partial(measure.measure_blocking, *on_model))
    stages.run("decode", partial(measure.measure_decode, *on_model))
    stages.run("parked", partial(measure.measure_parked, random_model, sizes, progress))
    stages.run("goodput", run_goodput)


def _reference(random_model: RandomModel, is_dry_run: bool, budget: Budget) -> Reference | None:
    from flowprefill.bench.gpu.reference import NAME, Reference

    shapes = TINY if is_dry_run else LLAMA_3_1_8B
    try:
        return Reference(shapes, random_model.model, random_model.weights)
    except BenchmarkError as error:
        budget.cut(f"{NAME}: {error}")
        return None


def _sizes(is_dry_run: bool) -> Sizes:
    from flowprefill.bench.decode import Lengths
    from flowprefill.bench.gpu.measure import Sizes

    if is_dry_run:
        return Sizes((512, 128), 3, 3, 4, (1, 2), Lengths(32, 8), 2)
    return Sizes((32_768, 8192, 2048), 12, 200, 16, (1, 8, 32, 64), Lengths(1024, 64), 8)


def _trace_sizes(is_dry_run: bool) -> TraceSizes:
    from flowprefill.bench.gpu.goodput import TraceSizes

    cells = ("s-edf/tile", "goodput/tile", "fcfs/whole", "s-edf/chunk:2048", "goodput/chunk:2048")
    if is_dry_run:
        chunked = tuple(cell.replace("2048", "64") for cell in cells)
        return TraceSizes(chunked, 1 / 32, 12, 2)
    return TraceSizes(cells, 1.0, 10_000, 20)


def _trace(given: Path | None) -> Path | None:
    if given is not None:
        return given
    beside_source = Path(__file__).resolve().parents[3] / "clients" / "traces" / DEFAULT_TRACE
    return beside_source if beside_source.is_file() else None


def _facts(random_model: RandomModel, is_dry_run: bool, seed: int) -> dict[str, Any]:
    from flowprefill.bench.gpu.facts import device_facts

    config, model = random_model.config, random_model.model
    return {
        **describe_run(config, seed),
        **device_facts(model.device.torch_device),
        "model": "random weights" + (", tiny" if is_dry_run else ", shapes of Llama-3.1-8B"),
        "shapes": dict(TINY if is_dry_run else LLAMA_3_1_8B),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": model.kernels,
        "bit_invariant": random_model.profile.is_bit_invariant,
        "max_slice_ms": config.max_slice_ms,
        "num_kv_tokens": model.cache.num_blocks * model.cache.block_size,
    }


def _report(stages: Stages, bars: Sequence[Bar], is_dry_run: bool, console: Any) -> dict[str, Any]:
    """Print tables and bars; returns the JSON object."""
    title = "bars" if not is_dry_run else "bars, of which none is judged"
    for table in make_tables(stages.figures):
        if is_dry_run:
            table.caption = DRY_RUN
        console.print(table)
    table = bar_table(title)
    add_bars(table, bars)
    console.print(table)
    for what in stages.cut:
        console.print(f"not measured: {what}")
    for name, reason in stages.failed.items():
        console.print(f"failed: {name}: {reason}")
    if is_dry_run:
        console.rule(DRY_RUN)
    result = stages.to_json()
    place = result["dry_run"] if is_dry_run else result
    place["bars"] = [bar.to_json() for bar in bars]
    return result
