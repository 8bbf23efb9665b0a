"""`flowprefill bench prefix`: what a prompt gains from another one that began alike.

In-process, without server and network. Each round has a prefix of its own: a first prompt with it
is cold, a second one finds the prefix in the KV cache and computes only its own end. An engine
without prefix caching then answers the second prompts again: cached or computed, the greedy tokens
must be the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.config import EngineConfig
from flowprefill.request import SLO

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.session import Answer, Session

PATIENT = SLO(ttft_s=600.0, tbt_s=10.0)


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and the answers."""

    prefix_tokens: int
    own_tokens: int
    """Behind the prefix, of each prompt."""
    answer_tokens: int


@dataclass
class Measured:
    """Everything measured in all rounds."""

    cold_ttft_s: list[float] = field(default_factory=list)
    warm_ttft_s: list[float] = field(default_factory=list)
    num_cached_tokens: list[int] = field(default_factory=list)
    """Prompt tokens that each second prompt found in the cache."""
    warm_token_ids: list[list[int]] = field(default_factory=list)
    """Answers to the second prompts."""
    cold_token_ids: list[list[int]] = field(default_factory=list)
    """Answers to the same prompts without prefix caching."""


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of prompts, each with a prefix.")] = 5,
    prefix_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that two prompts share.")
    ] = 4000,
    own_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt's own end.")] = 50,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure the TTFT of prompts whose beginning is cached, and compare their answers."""
    from rich.console import Console

    config = load_model_json(model_json)
    lengths = Lengths(prefix_tokens, own_tokens, answer_tokens)
    result = summarise(measure(config, rounds, lengths, seed))
    Console().print(make_table(result, lengths))
    facts = {"rounds": rounds, **dataclasses.asdict(lengths), **describe_run(config, seed)}
    print_json({**result, "run": facts}, json_out)


def measure(config: EngineConfig, rounds: int, lengths: Lengths, seed: int) -> Measured:
    """Load the model twice, with prefix caching and without; shows progress on standard error."""
    from flowprefill.bench.session import Session

    measured = Measured()
    with bench_progress(3 * rounds) as progress:
        cached = dataclasses.replace(config, enable_prefix_caching=True)
        with Session(cached, seed, progress.show_loading) as session:
            prompts = _measure_pairs(session, rounds, lengths, measured, progress)
        uncached = dataclasses.replace(config, enable_prefix_caching=False)
        with Session(uncached, seed, progress.show_loading) as session:
            for prompt in prompts:
                with progress.step("without prefix caching"):
                    answer = session.submit(prompt, PATIENT, lengths.answer_tokens)
                    measured.cold_token_ids.append(session.wait_end(answer).token_ids)
    return measured


def _measure_pairs(
    session: Session,
    rounds: int,
    lengths: Lengths,
    measured: Measured,
    progress: BenchProgress,
) -> list[list[int]]:
    """A cold and a warm prompt in each round, one after the other; returns the warm ones."""

    def answer(prompt: Sequence[int]) -> Answer:
        return session.wait_end(session.submit(prompt, PATIENT, lengths.answer_tokens))

    answer(session.random_prompt(lengths.own_tokens))  # what only the first request pays for
    warm_prompts = []
    for _ in range(rounds):
        prefix = session.random_prompt(lengths.prefix_tokens)
        with progress.step("cold"):
            cold = answer(prefix + session.random_prompt(lengths.own_tokens))
        warm_prompts.append(prefix + session.random_prompt(lengths.own_tokens))
        num_cached_before = session.engine.stats().num_cached_tokens
        with progress.step("warm"):
            warm = answer(warm_prompts[-1])
        measured.cold_ttft_s.append(cold.ttft_s)
        measured.warm_ttft_s.append(warm.ttft_s)
        num_cached = session.engine.stats().num_cached_tokens - num_cached_before
        measured.num_cached_tokens.append(num_cached)
        measured.warm_token_ids.append(warm.token_ids)
    return warm_prompts


def summarise(measured: Measured) -> dict[str, Any]:
    """The figures of the JSON line; TTFT are medians."""
    if not all(measured.num_cached_tokens):
        raise BenchmarkError(
            "a second prompt found nothing in the cache: is the KV cache too small?"
        )
    cold_s, warm_s = median(measured.cold_ttft_s), median(measured.warm_ttft_s)
    ratios = [w / c for w, c in zip(measured.warm_ttft_s, measured.cold_ttft_s, strict=True)]
    return {
        "warm_over_cold_ttft": round(warm_s / cold_s, 4),
        "same_text": measured.warm_token_ids == measured.cold_token_ids,
        "worst_ratio": round(max(ratios), 4),
        "cold_ttft_s": round(cold_s, 4),
        "warm_ttft_s": round(warm_s, 4),
        "num_cached_tokens": min(measured.num_cached_tokens),
        "num_pairs": len(ratios),
    }


def make_table(result: dict[str, Any], lengths: Lengths) -> Table:
    """One row per figure."""
    from rich.table import Table

    table = Table("", title=f"Two prompts that share {lengths.prefix_tokens} tokens")
    table.add_column("measured", justify="right")
    table.add_row("TTFT of the first, s", f"{result['cold_ttft_s']:.3f}")
    table.add_row("TTFT of the second, s", f"{result['warm_ttft_s']:.3f}")
    table.add_row("second / first", f"{result['warm_over_cold_ttft']:.1%}")
    table.add_row("the same, of the worst pair", f"{result['worst_ratio']:.1%}")
    table.add_row("tokens found in the cache", str(result["num_cached_tokens"]))
    table.add_row("same answer without caching", "yes" if result["same_text"] else "no")
    return table
