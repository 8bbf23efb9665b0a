"""`flowprefill bench hol`: does a short urgent prompt wait behind a long one?

Through a real tritonserver that holds the same model once per policy, or once per program and
policy. An idle engine costs nothing, so they alternate within seconds of each other, and the
machine's drift hits them alike. All times are taken at the client, from sending a request to its
first token.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.config import POLICIES, EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.metrics import percentile

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill_client import Client, Completion

Step = Callable[[str], contextlib.AbstractContextManager[None]]

MOMENTS = (0.1, 0.5, 0.9)
"""When the short prompt arrives, as a fraction of the long one's solo TTFT."""
SHORT_SLO_MS = 400.0
"""Objective of the short prompt, on a machine that is quick enough for it."""
SHORT_SLO_FACTOR = 3.0
"""Elsewhere its objective is this many times its TTFT alone, with the slowest of the models.
Without slack it would be late from the start, and rightly run behind what can still be on time."""
LONG_SLO_MS = 60_000.0
_MAX_TRIES = 3
"""For a short prompt to arrive before the long one is done, on a machine with noise."""


@dataclass
class Encounter:
    """A short prompt that arrived while a long one was running."""

    moment: float
    short_ttft_s: float
    long_ttft_s: float


@dataclass
class PolicyRun:
    """Everything measured under one policy."""

    short_slo_ms: float = SHORT_SLO_MS
    short_solo_s: list[float] = field(default_factory=list)
    long_solo_s: list[float] = field(default_factory=list)
    encounters: list[Encounter] = field(default_factory=list)
    blocking_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    decisions: int = 0

    def add_stats(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Count what the engine did between two calls of engine_stats()."""
        self.preemptions += after["num_preemptions"] - before["num_preemptions"]
        self.decisions += after["num_decisions"] - before["num_decisions"]


def run(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; the models alternate.")] = 5,
    long_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the long prompt.")] = 7500,
    short_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the short prompt.")] = 64,
    policies: Annotated[str, typer.Option(help="Policies, separated by commas.")] = "s-edf,fcfs",
    program: Annotated[
        str | None,
        typer.Option(
            help="native, hooks (the transformers model; a GGUF file is exported for it), or both "
            "beside each other; default: as the configuration says."
        ),
    ] = None,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure a short urgent prompt that arrives at 10, 50 and 90% of a long one's TTFT."""
    from rich.console import Console

    from flowprefill.bench.hooked import by_program
    from flowprefill_client import ServerError

    names = policies.split(",")
    for name in names:
        if name not in POLICIES:
            raise ConfigError(f"policy {name!r}: must be one of {', '.join(POLICIES)}")
    config = load_model_json(model_json)
    try:
        with by_program(config, program) as configs:
            models = contenders(configs, names)
            runs = measure(models, rounds, long_tokens, short_tokens, seed)
    except ServerError as error:
        raise BenchmarkError(f"the server failed a request: {error}") from error
    results = {name: summarise(one, long_tokens, short_tokens) for name, one in runs.items()}
    Console().print(make_table(results))
    facts = {"rounds": rounds, "granularity": config.granularity, **describe_run(config, seed)}
    print_json({**results, "run": {**facts, "program": program or config.program}}, json_out)


def contenders(
    configs: Mapping[str, EngineConfig], policies: Sequence[str]
) -> dict[str, EngineConfig]:
    """Models to measure, by policy; by `program/policy` where there are several programs."""
    from flowprefill.bench.servers import with_policy

    return {
        f"{program}/{policy}" if len(configs) > 1 else policy: with_policy(config, policy)
        for program, config in configs.items()
        for policy in policies
    }


def measure(
    models: Mapping[str, EngineConfig],
    rounds: int,
    long_tokens: int,
    short_tokens: int,
    seed: int,
) -> dict[str, PolicyRun]:
    """Start a server and measure all models; shows progress on standard error."""
    from rich.console import Console

    from flowprefill.bench.prompts import prompt_maker
    from flowprefill.bench.servers import model_name, serve_models
    from flowprefill_client import Client

    make_prompt = prompt_maker(next(iter(models.values())), seed)  # all have one tokenizer
    with contextlib.ExitStack() as stack:
        with Console(stderr=True).status(f"starting tritonserver with {len(models)} engines"):
            served = {model_name(name): config for name, config in models.items()}
            url = stack.enter_context(serve_models(served))
        num_steps = rounds * len(models) * (1 + len(MOMENTS))
        progress = stack.enter_context(bench_progress(num_steps))
        benches = {}
        for name in models:
            client = stack.enter_context(Client(url, model_name(name)))
            benches[name] = _Bench(name, client, make_prompt, long_tokens, short_tokens)
        slowest_s = max(bench.warm_up() for bench in benches.values())
        for bench in benches.values():
            bench.run.short_slo_ms = short_slo_ms(slowest_s)
        for index in range(rounds):
            for name in list(models)[:: 1 if index % 2 == 0 else -1]:
                benches[name].run_round(progress.step)
    return {name: bench.run for name, bench in benches.items()}


def short_slo_ms(solo_s: float) -> float:
    """The short prompt's objective where its TTFT alone is `solo_s` with the slowest model."""
    return max(SHORT_SLO_MS, math.ceil(SHORT_SLO_FACTOR * 1000 * solo_s))


class _Bench:
    """Sends the prompts of one model."""

    def __init__(
        self,
        name: str,
        client: Client,
        make_prompt: Callable[[int], str],
        long_tokens: int,
        short_tokens: int,
    ) -> None:
        self.run = PolicyRun()
        self._name = name
        self._client = client
        self._make_prompt = make_prompt
        self._long_tokens = long_tokens
        self._short_tokens = short_tokens

    def warm_up(self) -> float:
        """Pay for what only the first requests of an engine pay for; returns the last TTFT."""
        for _ in range(2):
            ttft_s = _ttft(self._send_short())
        return ttft_s

    def run_round(self, step: Step) -> None:
        """A long prompt alone; then for each moment a short one alone and one into a long one."""
        with step(f"{self._name}: long alone"):
            self.run.long_solo_s.append(_ttft(self._send(self._long_tokens, LONG_SLO_MS)))
        for moment in MOMENTS:
            with step(f"{self._name}: short at {moment:.0%} of long"):
                self.run.short_solo_s.append(_ttft(self._send_short()))
                before = self._client.engine_stats()
                self.run.encounters.append(self._meet(moment))
                self.run.add_stats(before, self._client.engine_stats())

    def _meet(self, moment: float) -> Encounter:
        """Send a long prompt, and a short one at `moment` of it."""
        expected_s = median(self.run.long_solo_s)
        for _ in range(_MAX_TRIES):
            long_prompt = self._make_prompt(self._long_tokens)
            short_prompt = self._make_prompt(self._short_tokens)
            with ThreadPoolExecutor(1) as pool:
                start_s = time.monotonic()
                long = pool.submit(self._generate, long_prompt, self._long_tokens, LONG_SLO_MS)
                time.sleep(moment * expected_s)
                sent_s = time.monotonic() - start_s
                short = self._generate(short_prompt, self._short_tokens, self.run.short_slo_ms)
                long_ttft_s = _ttft(long.result())
            if sent_s < long_ttft_s:
                return Encounter(moment, _ttft(short), long_ttft_s)
            expected_s = long_ttft_s  # undisturbed, and as fast as the machine is now
        raise BenchmarkError(
            f"{_MAX_TRIES} times the long prompt was done before {moment:.0%} of its usual time: "
            "the machine is too noisy"
        )

    def _send_short(self) -> Completion:
        return self._send(self._short_tokens, self.run.short_slo_ms)

    def _send(self, num_tokens: int, slo_ms: float) -> Completion:
        return self._generate(self._make_prompt(num_tokens), num_tokens, slo_ms)

    def _generate(self, prompt: str, num_tokens: int, slo_ms: float) -> Completion:
        answer = self._client.generate(
            prompt,
            max_tokens=1,
            ttft_slo_ms=slo_ms,
            return_timing=True,
            sampling={"temperature": 0},
        )
        if answer.num_input_tokens != num_tokens:
            raise BenchmarkError(
                f"a prompt of {num_tokens} tokens has {answer.num_input_tokens} on the server"
            )
        blocking_s = (answer.timing or {}).get("blocking_s")
        if blocking_s is not None:
            self.run.blocking_s.append(blocking_s)
        return answer


def summarise(run: PolicyRun, long_tokens: int, short_tokens: int) -> dict[str, Any]:
    """The figures of one policy, as they are in the JSON line."""
    short_solo_s, long_solo_s = median(run.short_solo_s), median(run.long_solo_s)
    short_s = [e.short_ttft_s for e in run.encounters]
    long_ttft_s = median(e.long_ttft_s for e in run.encounters)
    blocking_ms = [s * 1000 for s in run.blocking_s]
    return {
        "short_solo_ttft_s": _round(short_solo_s),
        "short_ttft_p50_s": _round(median(short_s)),
        "short_ttft_max_s": _round(max(short_s)),
        "long_solo_ttft_s": _round(long_solo_s),
        "long_ttft_p50_s": _round(long_ttft_s),
        "short_work_s": _round(short_solo_s),  # one short prompt interrupts each long one
        "long_ratio": _round(long_ttft_s / (long_solo_s + short_solo_s)),
        "blocking_p50_ms": _round(percentile(blocking_ms, 50)) if blocking_ms else None,
        "blocking_p99_ms": _round(percentile(blocking_ms, 99)) if blocking_ms else None,
        "preemptions": run.preemptions,
        "decisions": run.decisions,
        "short_slo_ms": run.short_slo_ms,
        "long_tokens": long_tokens,
        "short_tokens": short_tokens,
        "moments": {
            f"{moment:.0%}": _summarise_moment([e for e in run.encounters if e.moment == moment])
            for moment in MOMENTS
        },
    }


def _summarise_moment(encounters: list[Encounter]) -> dict[str, float]:
    return {
        "short_ttft_p50_s": _round(median(e.short_ttft_s for e in encounters)),
        "short_ttft_max_s": _round(max(e.short_ttft_s for e in encounters)),
        "long_ttft_p50_s": _round(median(e.long_ttft_s for e in encounters)),
        "long_ttft_max_s": _round(max(e.long_ttft_s for e in encounters)),
    }


def make_table(results: dict[str, dict[str, Any]]) -> Table:
    """One row per model and moment."""
    from rich.table import Table

    table = Table(title="TTFT in seconds: a short prompt meets a long one")
    table.add_column("policy")
    table.add_column("short arrives at")
    for heading in ("short p50", "short max", "long p50"):
        table.add_column(heading, justify="right")
    for policy, result in results.items():
        solo = (result["short_solo_ttft_s"], None, result["long_solo_ttft_s"])
        rows = [("alone", *solo)] + [
            (
                f"{moment} of long",
                r["short_ttft_p50_s"],
                r["short_ttft_max_s"],
                r["long_ttft_p50_s"],
            )
            for moment, r in result["moments"].items()
        ]
        for index, (label, *times) in enumerate(rows):
            cells = ["" if t is None else f"{t:.3f}" for t in times]
            last = index == len(rows) - 1
            table.add_row("" if index else policy, label, *cells, end_section=last)
    return table


def _ttft(answer: Completion) -> float:
    if answer.ttft_s is None:
        raise BenchmarkError("an answer without a token")
    return answer.ttft_s


def _round(value: float) -> float:
    return float(round(value, 4))
