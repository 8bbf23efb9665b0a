"""`flowprefill bench decode-mix`: a stream beside long prefills, with one device for both.

In-process, without server and network. In each round two long prompts are prefilled one after the
other, once alone and once while a stream of tokens runs; the order alternates, so that the
machine's drift hits both alike. Prompts are random, so no prefix is reused. Measured are the gaps
between the stream's tokens while a prefill runs, and what the stream costs the prefills.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed, finite
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.config import EngineConfig
from flowprefill.metrics import percentile
from flowprefill.request import SLO

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.session import Answer, Session

NUM_PREFILLS = 2
"""One after the other, in each part of a round."""
_WARM_UP_TOKENS = 8
LONG_SLO = SLO(ttft_s=600.0, tbt_s=1.0)
"""Always feasible: a prefill that is late anyway might be put off."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of the prompts and of the stream."""

    long_tokens: int
    stream_prompt_tokens: int
    stream_tokens: int


@dataclass
class Measured:
    """Everything measured in all rounds, seconds."""

    alone_ttft_s: list[float] = field(default_factory=list)
    mixed_ttft_s: list[float] = field(default_factory=list)
    """Of prefills beside a stream."""
    gaps_s: list[float] = field(default_factory=list)
    """Between tokens of a stream, while a prefill ran."""
    covered_s: float = 0.0
    """Time of prefills beside a stream in which that had not ended."""

    def add(self, token_s: Sequence[float], prefills_s: Sequence[tuple[float, float]]) -> None:
        """A stream's tokens, and from when to when each prefill beside it lasted."""
        self.mixed_ttft_s += [end_s - start_s for start_s, end_s in prefills_s]
        self.covered_s += sum(max(0.0, min(e, token_s[-1]) - s) for s, e in prefills_s)
        for before_s, after_s in itertools.pairwise(token_s):
            if any(before_s < end_s and after_s > start_s for start_s, end_s in prefills_s):
                self.gaps_s.append(after_s - before_s)


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each with and without stream.")] = 2,
    long_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a long prompt.")] = 7500,
    stream_prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the stream's prompt.")
    ] = 32,
    stream_tokens: Annotated[int, typer.Option(min=2, help="Tokens that the stream gives.")] = 200,
    tbt_slo_ms: Annotated[
        float, typer.Option(min=1, callback=finite, help="TBT objective of the stream.")
    ] = 100.0,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure inter-token gaps of a stream during long prefills, and the prefills' slowdown."""
    from rich.console import Console

    config = load_model_json(model_json)
    lengths = Lengths(long_tokens, stream_prompt_tokens, stream_tokens)
    result = summarise(measure(config, rounds, lengths, tbt_slo_ms, seed), tbt_slo_ms)
    Console().print(make_table(result, lengths))
    facts = {"rounds": rounds, **dataclasses.asdict(lengths), **describe_run(config, seed)}
    print_json({**result, "run": facts}, json_out)


def measure(
    config: EngineConfig, rounds: int, lengths: Lengths, tbt_slo_ms: float, seed: int
) -> Measured:
    """Load the model and run all rounds; shows progress on standard error."""
    from flowprefill.bench.session import Session

    with (
        bench_progress(2 * NUM_PREFILLS * rounds) as progress,
        Session(config, seed, progress.show_loading) as session,
    ):
        bench = _Bench(session, lengths, tbt_slo_ms, progress.advance)
        progress.describe("warm-up")
        bench.warm_up()
        for index in range(rounds):
            parts: list[tuple[str, Callable[[], None]]] = [
                ("prefills alone", bench.prefill_alone),
                ("prefills beside a stream", bench.prefill_mixed),
            ]
            for name, part in parts if index % 2 == 0 else reversed(parts):
                progress.describe(name)
                part()
    return bench.measured


class _Bench:
    """Sends the prompts of one run."""

    def __init__(
        self,
        session: Session,
        lengths: Lengths,
        tbt_slo_ms: float,
        on_prefill: Callable[[], None],
    ) -> None:
        """on_prefill: called behind each."""
        self.measured = Measured()
        self._session = session
        self._lengths = lengths
        self._stream_slo = SLO(LONG_SLO.ttft_s, tbt_slo_ms / 1000)
        self._on_prefill = on_prefill

    def warm_up(self) -> None:
        """Pay for what only the first requests of an engine pay for."""
        self._session.wait_end(self._start_stream(_WARM_UP_TOKENS))

    def prefill_alone(self) -> None:
        self.measured.alone_ttft_s += [answer.ttft_s for answer in self._prefill()]

    def prefill_mixed(self) -> None:
        stream = self._start_stream(self._lengths.stream_tokens)
        prefills = self._prefill()
        self._session.wait_end(stream)
        self.measured.add(stream.token_s, [(p.arrival_s, p.token_s[0]) for p in prefills])

    def _start_stream(self, num_tokens: int) -> Answer:
        """A stream that has given its first token."""
        prompt = self._session.random_prompt(self._lengths.stream_prompt_tokens)
        return self._session.wait_token(self._session.submit(prompt, self._stream_slo, num_tokens))

    def _prefill(self) -> list[Answer]:
        """Long prompts one after the other; returns their answers."""
        answers = []
        for _ in range(NUM_PREFILLS):
            prompt = self._session.random_prompt(self._lengths.long_tokens)
            answers.append(self._session.wait_token(self._session.submit(prompt, LONG_SLO)))
            self._on_prefill()
        return answers


def summarise(measured: Measured, tbt_slo_ms: float) -> dict[str, Any]:
    """The figures of the JSON line. prefill_slowdown: 0.1 = TTFT 10% longer beside the stream."""
    if not measured.gaps_s:
        raise BenchmarkError("the stream ended before a prefill began: give it more tokens")
    gaps_ms = [s * 1000 for s in measured.gaps_s]
    alone_s, mixed_s = median(measured.alone_ttft_s), median(measured.mixed_ttft_s)
    return {
        "itl_p99_ms": round(percentile(gaps_ms, 99), 3),
        "tbt_slo_ms": tbt_slo_ms,
        "prefill_slowdown": round(mixed_s / alone_s - 1, 4),
        "itl_p50_ms": round(percentile(gaps_ms, 50), 3),
        "itl_max_ms": round(max(gaps_ms), 3),
        "num_gaps": len(gaps_ms),
        "prefill_alone_ttft_s": round(alone_s, 4),
        "prefill_mixed_ttft_s": round(mixed_s, 4),
        "num_prefills": len(measured.mixed_ttft_s),
        "stream_coverage": round(measured.covered_s / sum(measured.mixed_ttft_s), 4),
    }


def make_table(result: dict[str, Any], lengths: Lengths) -> Table:
    """One row per figure."""
    from rich.table import Table

    title = f"A stream of {lengths.stream_tokens} tokens beside prefills of {lengths.long_tokens}"
    table = Table("", title=title)
    table.add_column("measured", justify="right")
    times = (f"{result[key]:.1f}" for key in ("itl_p50_ms", "itl_p99_ms", "itl_max_ms"))
    table.add_row("inter-token gap p50 / p99 / max, ms", " / ".join(times))
    table.add_row("TBT objective, ms", f"{result['tbt_slo_ms']:g}")
    table.add_row("gaps while a prefill ran", str(result["num_gaps"]))
    table.add_row("prefill TTFT alone, s", f"{result['prefill_alone_ttft_s']:.3f}")
    table.add_row("prefill TTFT beside the stream, s", f"{result['prefill_mixed_ttft_s']:.3f}")
    table.add_row("prefill slowdown", f"{result['prefill_slowdown']:.1%}")
    table.add_row("share of prefill time with the stream", f"{result['stream_coverage']:.1%}")
    return table
