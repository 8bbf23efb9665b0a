"""`flowprefill bench blocking`: how long an urgent prompt waits for the device it should have.

In-process, without server and network. While a long prompt is prefilled, short urgent ones arrive
at random moments. The engine measures the blocking time: from the arrival in its inbox to the
device start of the newcomer's first slice. What the preemptions cost the long prompt is its own
time, without that of the short ones, beside the time it takes alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.intervals import median_and_interval
from flowprefill.bench.options import JsonOut, ModelJson, Seed, prompt_tokens
from flowprefill.bench.plotting import check_plot, figure
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import describe_run, load_model_json, print_json
from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.blocking_run import Cell

LENGTHS = (512, 2048, 8192)
GRANULARITIES = ("tile", "op", "layer")

Results = dict[str, dict[str, dict[str, Any]]]
"""Figures by granularity and length."""


def run(
    preemptions: Annotated[
        int,
        typer.Option(min=1, max=2000, help="Short prompts, for each granularity and length."),
    ] = 300,
    long_tokens: Annotated[
        list[int] | None,
        typer.Option(
            min=2, help="Tokens of the long prompt; may be repeated. Default: 512, 2048 and 8192."
        ),
    ] = None,
    short_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the short prompts.")] = 16,
    granularity: Annotated[
        list[str] | None,
        typer.Option(
            help="whole, chunk:N, layer, op or tile; may be repeated. Default: tile, op and layer."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw blocking times over lengths: .png, .svg, .pdf")
    ] = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure blocking times at random moments of a long prefill."""
    from rich.console import Console

    check_plot(plot)
    names = granularity or list(GRANULARITIES)
    for name in names:
        Granularity.parse(name)  # a typing error ends the run before its first minute
    config = load_model_json(model_json)
    lengths = sorted(set(long_tokens or LENGTHS))
    results, kernels = measure(config, names, lengths, preemptions, short_tokens, seed)
    Console().print(make_table(results))
    if plot is not None:
        draw(results, 2 * config.max_slice_ms, plot)
    facts = {
        **describe_run(config, seed),
        "kernels": kernels,
        "max_slice_ms": config.max_slice_ms,
        "short_tokens": short_tokens,
    }
    print_json({**results, **layer_to_tile(results), "run": facts}, json_out)


def measure(
    config: EngineConfig,
    granularities: Sequence[str],
    lengths: Sequence[int],
    preemptions: int,
    short_tokens: int,
    seed: int,
) -> tuple[Results, str]:
    """One engine for each granularity, all lengths on it; shows progress on standard error.

    Returns the figures, and whose kernels ran.
    """
    from flowprefill.bench.blocking_run import BlockingBench
    from flowprefill.bench.session import Session

    results: Results = {}
    with bench_progress(len(granularities) * len(lengths) * preemptions) as progress:
        for name in granularities:
            one = dataclasses.replace(config, granularity=name, policy="s-edf")
            with Session(one, seed, progress.show_loading) as session:
                bench = BlockingBench(session, short_tokens, seed)
                limit = session.engine.info.max_model_len
                counts = {length: prompt_tokens(length, limit) for length in lengths}
                bench.warm_up()
                results[name] = {}
                for length, num_tokens in counts.items():
                    progress.describe(f"{name}, {length} tokens")
                    cell = bench.measure(num_tokens, preemptions, progress.advance)
                    results[name][str(length)] = summarise(cell, num_tokens)
                kernels = session.engine.info.kernels
    return results, kernels


def summarise(cell: Cell, num_tokens: int) -> dict[str, Any]:
    """The figures of one granularity and length, as they are in the JSON line.

    throughput_ratio: 0.98 = the long prompt's own work was 2% slower than undisturbed; the median
    over prefills, each beside the undisturbed one before it, and its 95% interval
    """
    times_ms = [s * 1000 for s in cell.blocking_s]
    ratios = [one.undisturbed_s / one.own_s for one in cell.interrupted]
    ratio, *interval = median_and_interval(ratios)
    return {
        "p50_ms": round(percentile(times_ms, 50), 3),
        "p99_ms": round(percentile(times_ms, 99), 3),
        "max_ms": round(max(times_ms), 3),
        "throughput_ratio": ratio,
        "throughput_ratio_interval": interval or None,
        "num_preemptions": len(times_ms),
        "num_prefills": len(cell.interrupted),
        "num_undisturbed": len(cell.undisturbed_s),
        "undisturbed_s": round(percentile(cell.undisturbed_s, 50), 4),
        "num_tokens": num_tokens,
    }


def layer_to_tile(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, float]:
    """How much longer boundaries at layers block than those at tiles, at the longest prompt."""
    if not {"layer", "tile"} <= results.keys():
        return {}
    longest = max(results["tile"], key=int)
    layer, tile = results["layer"][longest], results["tile"][longest]
    return {
        "blocking_ratio_layer_to_tile": round(layer["p99_ms"] / tile["p99_ms"], 2),
        "blocking_ratio_layer_to_tile_p50": round(layer["p50_ms"] / tile["p50_ms"], 2),
    }


def make_table(results: Results) -> Table:
    """One row per granularity and length."""
    from rich.table import Table

    table = Table(title="Blocking time in ms of a short prompt, by when a long one may be left")
    table.add_column("granularity")
    headings = ("tokens", "p50", "p99", "max", "preemptions", "long prompt's own rate")
    for heading in headings:
        table.add_column(heading, justify="right")
    for name, by_length in results.items():
        for index, (length, one) in enumerate(by_length.items()):
            times = (f"{one[key]:.2f}" for key in ("p50_ms", "p99_ms", "max_ms"))
            rate = f"{one['throughput_ratio']:.3f}"
            last = index == len(by_length) - 1
            label = "" if index else name
            row = (label, length, *times, str(one["num_preemptions"]), rate)
            table.add_row(*row, end_section=last)
    return table


def draw(results: Results, promised_ms: float, path: Path) -> None:
    """Blocking times over prompt lengths: 99th percentiles as lines, medians dashed."""
    from matplotlib.ticker import LogLocator, ScalarFormatter

    with figure(path, (7, 4.5)) as axes:
        for index, (name, by_length) in enumerate(results.items()):
            tokens = [one["num_tokens"] for one in by_length.values()]
            for key, style, label in (("p99_ms", "o-", f"{name}, p99"), ("p50_ms", "o--", None)):
                times = [one[key] for one in by_length.values()]
                axes.plot(tokens, times, style, color=f"C{index}", label=label)
        axes.axhline(promised_ms, color="grey", linewidth=1, label="promised p99 of tile")
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(tokens, [str(count) for count in tokens])
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.minorticks_off()
        axes.set_xlabel("tokens of the long prompt")
        axes.set_ylabel("blocking time, ms (dashed: median)")
        axes.legend()
