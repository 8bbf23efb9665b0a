"""`flowprefill bench hooks`: what the boundaries of a transformers model cost, and what they give.

In-process, without server. The cost is that of one forward pass left at every boundary, beside the
same pass of the same model without hooks, in alternating rounds. What it buys is the blocking time
of urgent prompts during a long prefill (bench blocking), for each choice of boundaries. Beside it
stands the memory that a parked prefill holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench import blocking
from flowprefill.bench.bars import Bar, add_bars, bar_table
from flowprefill.bench.intervals import median_and_interval
from flowprefill.bench.options import Dtype, JsonOut, ModelJson, Seed, finite, load_config
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import describe_run, print_json
from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.prefill_rounds import Rounds

BOUNDARIES = ("parts", "layers", "Linear")
OVERHEAD_LIMIT = 1.02
"""Most that a pass with boundaries may take of the time of one without."""


def run(
    boundaries: Annotated[
        list[str] | None,
        typer.Option(
            help="parts (mixer and MLP of each layer), layers, or class names with commas between; "
            f"may be repeated. Default: {', '.join(BOUNDARIES)}."
        ),
    ] = None,
    overhead_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the prompt whose passes are compared.")
    ] = 2048,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of that at most.")] = 20,
    budget_s: Annotated[
        float,
        typer.Option(min=0, callback=finite, help="Time for them, from the third round on."),
    ] = 300.0,
    long_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of the prompt that short ones interrupt.")
    ] = 7500,
    short_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the short prompts.")] = 16,
    preemptions: Annotated[
        int, typer.Option(min=0, max=2000, help="Short prompts, for each choice; 0 = none.")
    ] = 300,
    dtype: Dtype = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure what leaving a transformers model at its modules costs and gives."""
    from rich.console import Console

    from flowprefill.bench.hooked import hooked

    config = load_config(model_json, dtype)
    names = list(dict.fromkeys(boundaries or BOUNDARIES))
    with hooked(config) as served:
        result, class_names = measure_passes(
            served, names, overhead_tokens, long_tokens, rounds, budget_s, seed
        )
        if preemptions:
            for name, classes in class_names.items():
                one = dataclasses.replace(served, hook_boundaries=classes)
                result["boundaries"][name] |= measure_blocking(
                    one, long_tokens, preemptions, short_tokens, seed
                )
    bars = judge(result, overhead_tokens)
    console = Console(width=120)
    console.print(make_table(result["boundaries"], long_tokens, config.granularity))
    table = bar_table("Left at every boundary, beside the plain forward pass")
    add_bars(table, bars)
    console.print(table)
    facts = {**describe_run(config, seed), "granularity": config.granularity}
    facts |= {"overhead_tokens": overhead_tokens, "long_tokens": long_tokens}
    print_json({**result, "bars": [bar.to_json() for bar in bars], "run": facts}, json_out)
    if not all(bar.is_met for bar in bars):
        raise typer.Exit(1)


def measure_passes(
    config: EngineConfig,
    names: list[str],
    overhead_tokens: int,
    long_tokens: int,
    rounds: int,
    budget_s: float,
    seed: int,
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """All that needs no engine. Returns figures, and the classes of each choice of boundaries."""
    from flowprefill.bench.hooks_run import HookBench

    with bench_progress(rounds + len(names)) as progress:
        progress.describe("loading the model")
        bench = HookBench(config)
        num_overhead, num_long = map(bench.tokens_of, (overhead_tokens, long_tokens))
        classes = {name: bench.class_names(name) for name in names}
        granularity = Granularity.parse(config.granularity)
        choices = {}
        for name in names:
            with progress.step(f"{name}: what a parked prefill holds"):
                num_slices, most = bench.parked(name, granularity, num_long)
                choices[name] = {
                    "num_boundaries": num_slices - 1,
                    "parked_bytes": most,
                    "parked_share_of_weights": round(most / bench.weight_bytes, 4),
                }
        progress.describe(f"passes over {num_overhead} tokens")
        measured = bench.overhead(num_overhead, rounds, budget_s, seed, progress.advance)
    return {**summarise_overhead(measured), "boundaries": choices}, classes


def measure_blocking(
    config: EngineConfig, long_tokens: int, preemptions: int, short_tokens: int, seed: int
) -> dict[str, Any]:
    """The figures of bench blocking at the configuration's granularity."""
    name = config.granularity
    results, _ = blocking.measure(config, [name], [long_tokens], preemptions, short_tokens, seed)
    return results[name][str(long_tokens)]


def summarise_overhead(rounds: Rounds) -> dict[str, Any]:
    """Figures of the JSON line. Ratios are medians over rounds, with 95% intervals.

    overhead_ratio: 1.01 = left at every boundary, a pass takes 1% longer than the plain one
    tiles_ratio: the same of the engine's passes over tiles, which are other passes
    """
    from flowprefill.bench.hooks_run import HOOKED, PLAIN, TILES

    overhead, *interval = median_and_interval(rounds.ratios(PLAIN, HOOKED))
    tiles, *tiles_interval = median_and_interval(rounds.ratios(PLAIN, TILES))
    return {
        "overhead_ratio": overhead,
        "overhead_ratio_interval": interval or None,
        "tiles_ratio": tiles,
        "tiles_ratio_interval": tiles_interval or None,
        "plain_s": round(rounds.median_s(PLAIN), 4),
        "hooked_s": round(rounds.median_s(HOOKED), 4),
        "tiles_s": round(rounds.median_s(TILES), 4),
        "num_rounds": rounds.num_rounds,
    }


def judge(result: Mapping[str, Any], overhead_tokens: int) -> list[Bar]:
    """result: as of summarise_overhead()"""
    what = f"time of a pass over {overhead_tokens} tokens, hooked / plain"
    ends = result["overhead_ratio_interval"]
    bars = [Bar(what, result["overhead_ratio"], OVERHEAD_LIMIT, "")]
    if ends:
        bars += [
            Bar("its 95% interval: low end", ends[0], None, ""),
            Bar("its 95% interval: high end", ends[1], None, ""),
        ]
    return [*bars, Bar("in tiles as the engine does it / plain", result["tiles_ratio"], None, "")]


def make_table(
    choices: Mapping[str, Mapping[str, Any]], long_tokens: int, granularity: str
) -> Table:
    """One row per choice of boundaries; choices: `boundaries` of the JSON line."""
    from rich.table import Table

    title = f"A prompt of {long_tokens} tokens in `{granularity}`: blocking in ms, what is parked"
    table = Table("boundaries", title=title)
    times = ("p50", "p99", "max")
    for heading in ("in a pass", *times, "long prompt's own rate", "parked MB", "of weights"):
        table.add_column(heading, justify="right")
    for name, one in choices.items():
        times_ms = [one.get(f"{key}_ms") for key in times]
        cells = ["" if ms is None else f"{ms:.2f}" for ms in times_ms]
        rate = f"{one['throughput_ratio']:.3f}" if "throughput_ratio" in one else ""
        parked = (f"{one['parked_bytes'] / 1e6:.2f}", f"{one['parked_share_of_weights']:.2%}")
        table.add_row(name, str(one["num_boundaries"]), *cells, rate, *parked)
    return table
