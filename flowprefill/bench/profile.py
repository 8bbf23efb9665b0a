"""`flowprefill profile`: what the predictor has learnt of this machine, and how far it is right.

In-process, without server and scheduler. The profile is taken as at a load (or read from the
cache); then unseen prompts of random lengths are prefilled one after the other, each predicted just
before, with the device-speed factor that the ones before it have led to.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.plotting import check_plot, figure
from flowprefill.bench.report import describe_run, load_model_json, print_json
from flowprefill.clock import MonotonicClock
from flowprefill.granularity import Granularity
from flowprefill.metrics import percentile

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.config import EngineConfig
    from flowprefill.loading import LoadedModel
    from flowprefill.predictor.fitted import FittedPredictor
    from flowprefill.predictor.profile import Profile

MIN_TOKENS = 16


@dataclass(frozen=True)
class Measured:
    """One whole prefill."""

    num_tokens: int
    predicted_s: float
    profiled_s: float
    """As predicted with a device-speed factor of 1."""
    measured_s: float


def run(
    prompts: Annotated[
        int, typer.Option(min=0, help="Unseen prompts; 200 of up to 8000 tokens take long.")
    ] = 200,
    max_tokens: Annotated[
        int, typer.Option(min=MIN_TOKENS, help="Longest of them; lengths are log-uniform.")
    ] = 8000,
    model_json: ModelJson = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Take a new profile, whatever the cache holds.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw predicted against measured seconds: .png, .svg, .pdf")
    ] = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Show the profile's fit, and predicted against measured prefills."""
    from rich.console import Console

    from flowprefill.predictor.fitted import FittedPredictor

    check_plot(plot)
    config = load_model_json(model_json)
    model, profile = _load(config, refresh)
    granularity = Granularity.parse(config.granularity)
    limits = model.program.limits
    predictor = FittedPredictor.from_profile(profile, model.spec.num_layers, limits, granularity)
    origin = "from the cache; took" if profile.is_cached else "took"
    console = Console()
    console.print(f"profile {origin} {profile.calibration_s:.1f} s")
    if not profile.is_steady:
        console.print("the machine was busy with something else: not kept in the cache")
    console.print(fit_table(profile, predictor))
    room = model.cache.num_blocks * model.cache.block_size
    limit = min(max_tokens, model.spec.max_position_embeddings - 1, room)
    measured = measure(config, model, predictor, draw_lengths(prompts, limit, seed), seed)
    result = summarise(profile, predictor, measured)
    if measured:
        console.print(
            f"{len(measured)} unseen prompts of {MIN_TOKENS}-{limit} tokens, error in the median: "
            f"{result['prefill_mdape']:.1%} (speed factor {predictor.speed_factor:.2f} at the end)"
        )
    if plot is not None:
        draw(measured, plot)
    run_facts = describe_run(config, seed) | {"max_tokens": limit}
    print_json({**result, "run": run_facts}, json_out)


def _load(config: EngineConfig, refresh: bool) -> tuple[LoadedModel, Profile]:
    from rich.console import Console

    from flowprefill.loading import load_model, profile_model

    console = Console(stderr=True)
    with console.status("loading") as status:

        def show(stage: str, fraction: float) -> None:
            status.update(f"loading: {stage} {fraction:.0%}")

        model = load_model(config, show)
        return model, profile_model(model, MonotonicClock(), show, refresh=refresh)


def draw_lengths(count: int, max_tokens: int, seed: int) -> list[int]:
    """Prompt lengths, log-uniform in MIN_TOKENS..max_tokens."""
    rng = random.Random(seed)
    low, high = math.log(MIN_TOKENS), math.log(max(max_tokens, MIN_TOKENS))
    return [min(max_tokens, round(math.exp(rng.uniform(low, high)))) for _ in range(count)]


def measure(
    config: EngineConfig,
    model: LoadedModel,
    predictor: FittedPredictor,
    lengths: Sequence[int],
    seed: int,
) -> list[Measured]:
    """Prefill a prompt of each length as the engine would, alone on the device."""
    from rich.console import Console
    from rich.progress import Progress

    from flowprefill.executor.executor import Executor
    from flowprefill.interrupt import Interrupt
    from flowprefill.kv.block_table import BlockTable
    from flowprefill.programs.program import SequenceInput

    clock = MonotonicClock()
    executor = Executor(model.device, clock, predictor.profiled_s)
    granularity = Granularity.parse(config.granularity)
    rng = random.Random(seed)
    results = []
    with Progress(console=Console(stderr=True), refresh_per_second=2) as progress:
        task = progress.add_task("prefills", total=sum(map(predictor.prefill_s, lengths)))
        for num_tokens in lengths:
            tokens = rng.choices(range(model.spec.vocab_size), k=num_tokens)
            blocks = range(-(-num_tokens // config.block_size))
            table = BlockTable(blocks, config.block_size, model.device.torch_device)
            predicted_s = predictor.prefill_s(num_tokens)
            profiled_s = predicted_s / predictor.speed_factor
            started_s = clock.now_s()
            state = model.program.prefill([SequenceInput(tokens, 0, table)], granularity)
            report = executor.run(state, Interrupt(clock))
            measured_s = clock.now_s() - started_s
            predictor.observe(report.busy_s, report.profiled_s)
            results.append(Measured(num_tokens, predicted_s, profiled_s, measured_s))
            progress.advance(task, predicted_s)
        progress.update(task, completed=progress.tasks[0].total)
    return results


def summarise(
    profile: Profile, predictor: FittedPredictor, measured: Sequence[Measured]
) -> dict[str, Any]:
    """The figures of the JSON line; errors are fractions of the measured time."""
    errors = [abs(m.predicted_s / m.measured_s - 1) for m in measured]
    fit_errors = [abs(m.profiled_s / m.measured_s - 1) for m in measured]
    return {
        "prefill_mdape": round(statistics.median(errors), 4) if errors else None,
        "prefill_p90_ape": round(percentile(errors, 90), 4) if errors else None,
        "prefill_mdape_without_speed_factor": (
            round(statistics.median(fit_errors), 4) if errors else None
        ),
        "saturation_tokens": predictor.saturation_tokens,
        "calibration_s": round(profile.calibration_s, 2),
        "is_cached": profile.is_cached,
        "is_steady": profile.is_steady,
        "speed_factor": round(predictor.speed_factor, 4),
        "num_prompts": len(measured),
        "num_tokens": sum(m.num_tokens for m in measured),
    }


def fit_table(profile: Profile, predictor: FittedPredictor) -> Table:
    """Each slice kind's formula and how far it is from the slices it was fitted to."""
    from rich.table import Table

    from flowprefill.predictor.features import FEATURE_NAMES, slice_kind

    table = Table(title="Seconds of a slice, and the fit's error over the shapes that were timed")
    table.add_column("slices")
    table.add_column("microseconds")
    for heading in ("shapes", "median", "p90"):
        table.add_column(heading, justify="right")
    for kind, names in FEATURE_NAMES.items():
        errors = [
            abs(predictor.profiled_s(piece) / seconds - 1)
            for piece, seconds in profile.samples
            if slice_kind(piece) == kind
        ]
        if errors:
            formula = _formula(names, predictor.coefficients[kind])
            quantiles = (f"{percentile(errors, q):.1%}" for q in (50, 90))
            table.add_row(kind, formula, str(len(errors)), *quantiles)
    return table


def _formula(names: Iterable[str], coefficients: Iterable[float]) -> str:
    terms = [
        f"{value * 1e6:.3g}{' per ' if name else ''}{name}"
        for name, value in zip(names, coefficients, strict=True)
        if value > 0
    ]
    return " + ".join(terms) or "0"


def draw(measured: Sequence[Measured], path: Path) -> None:
    """Predicted against measured seconds, with the line of equality and 10% about it."""
    times = [t for m in measured for t in (m.measured_s, m.predicted_s)] or [1.0]
    ends = [min(times) / 1.3, max(times) * 1.3]
    with figure(path, (6, 6)) as axes:
        axes.plot(ends, ends, color="black", linewidth=1)
        axes.fill_between(ends, [0.9 * t for t in ends], [1.1 * t for t in ends], alpha=0.15)
        axes.scatter([m.measured_s for m in measured], [m.predicted_s for m in measured], s=10)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set_xlabel("measured prefill, s")
        axes.set_ylabel("predicted prefill, s")
