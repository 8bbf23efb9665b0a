"""`flowprefill bench path`: what the way through the server adds to the time to first token.

A real tritonserver, idle, and an engine in this process get the same short prompts in turn, one at
a time. The overhead of a prompt is its TTFT at the client, from sending the request over gRPC to
the first answer, minus its TTFT in the process, from the engine's arrival stamp to the token. The
server's own statistics know two parts: how long a request queues, and how long execute() takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, ModelJson, Seed
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import BenchmarkError, describe_run, load_model_json, print_json
from flowprefill.metrics import percentile
from flowprefill.request import SLO

if TYPE_CHECKING:
    from rich.table import Table

    from flowprefill.bench.session import Session
    from flowprefill.config import EngineConfig
    from flowprefill_client import Client

Statistics = dict[str, tuple[int, float]]
"""Number and sum of seconds, by part."""

SERVER_PARTS = {"queue": "queue", "execute": "compute_infer"}
"""Our names of the server's statistics: a decoupled model computes until execute() has returned."""
PATIENT = SLO(ttft_s=60.0, tbt_s=10.0)
_WARM_UP = 5


@dataclass
class Measured:
    """TTFT of each prompt, seconds."""

    client_s: list[float] = field(default_factory=list)
    in_process_s: list[float] = field(default_factory=list)
    server_mean_s: dict[str, float] = field(default_factory=dict)
    """Mean of each part that the server's statistics know, over the same prompts."""


def run(
    prompts: Annotated[int, typer.Option(min=1, help="Prompts, each sent both ways.")] = 300,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 16,
    model_json: ModelJson = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Measure TTFT through a server minus TTFT in the process."""
    from rich.console import Console

    from flowprefill_client import ServerError

    config = load_model_json(model_json)
    try:
        measured = measure(config, prompts, prompt_tokens, seed)
    except ServerError as error:
        raise BenchmarkError(f"the server failed a request: {error}") from error
    result = summarise(measured)
    Console().print(make_table(result, prompt_tokens))
    facts = {"prompt_tokens": prompt_tokens, **describe_run(config, seed)}
    print_json({**result, "run": facts}, json_out)


def measure(config: EngineConfig, prompts: int, prompt_tokens: int, seed: int) -> Measured:
    """Start a server and an engine, send all prompts; shows progress on standard error."""
    from flowprefill.bench.prompts import prompt_maker
    from flowprefill.bench.servers import model_name, serve_policies
    from flowprefill.bench.session import Session
    from flowprefill.tokenizer import load_tokenizer
    from flowprefill_client import Client

    make_prompt, encode = prompt_maker(config, seed), load_tokenizer(config).encode
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(bench_progress(prompts))
        progress.describe("starting tritonserver")
        url = stack.enter_context(serve_policies(config, [config.policy]))
        model = model_name(config.policy)
        client = stack.enter_context(Client(url, model))
        session = stack.enter_context(Session(config, seed, progress.show_loading))
        bench = _Bench(client, session, encode)
        for _ in range(_WARM_UP):
            bench.send_both_ways(make_prompt(prompt_tokens))
        bench.measured = Measured()
        before = _server_statistics(url, model)
        for index in range(prompts):
            with progress.step("prompts"):
                bench.send_both_ways(make_prompt(prompt_tokens), server_first=index % 2 == 0)
        bench.measured.server_mean_s = mean_between(before, _server_statistics(url, model))
    return bench.measured


class _Bench:
    """Sends prompts one at a time."""

    def __init__(
        self, client: Client, session: Session, encode: Callable[[str], list[int]]
    ) -> None:
        self.measured = Measured()
        self._client = client
        self._session = session
        self._encode = encode

    def send_both_ways(self, prompt: str, server_first: bool = True) -> None:
        ways = (self._send_to_server, self._send_in_process)
        for send in ways if server_first else reversed(ways):
            send(prompt)

    def _send_to_server(self, prompt: str) -> None:
        answer = self._client.generate(prompt, max_tokens=1, sampling={"temperature": 0})
        if answer.ttft_s is None:
            raise BenchmarkError("an answer without a token")
        self.measured.client_s.append(answer.ttft_s)

    def _send_in_process(self, prompt: str) -> None:
        answer = self._session.submit(self._encode(prompt), PATIENT)
        self.measured.in_process_s.append(self._session.wait_end(answer).ttft_s)


def _server_statistics(url: str, model: str) -> Statistics:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(url) as client:
        statistics = client.get_inference_statistics(model, as_json=True)
    parts = statistics["model_stats"][0]["inference_stats"]
    return {
        name: (int(parts[key].get("count", 0)), int(parts[key].get("ns", 0)) / 1e9)
        for name, key in SERVER_PARTS.items()
    }


def mean_between(before: Statistics, after: Statistics) -> dict[str, float]:
    """Mean seconds of what was counted between two calls; without what was not."""
    means = {}
    for name, (count, seconds) in after.items():
        count_before, seconds_before = before[name]
        if count > count_before:
            means[name] = (seconds - seconds_before) / (count - count_before)
    return means


def summarise(measured: Measured) -> dict[str, Any]:
    """The figures of the JSON line. Overheads are differences of the two TTFT of one prompt.

    server_mean_ms: parts of the way in, of which the client's TTFT consists beside others
    """
    pairs = zip(measured.client_s, measured.in_process_s, strict=True)
    overhead_ms = [1000 * (client_s - in_process_s) for client_s, in_process_s in pairs]
    return {
        "overhead_p50_ms": _round(median(overhead_ms)),
        "overhead_p99_ms": _round(percentile(overhead_ms, 99)),
        "client_ttft_p50_ms": _round(1000 * median(measured.client_s)),
        "client_ttft_p99_ms": _round(1000 * percentile(measured.client_s, 99)),
        "in_process_ttft_p50_ms": _round(1000 * median(measured.in_process_s)),
        "in_process_ttft_p99_ms": _round(1000 * percentile(measured.in_process_s, 99)),
        "client_ttft_mean_ms": _mean_ms(measured.client_s),
        "in_process_ttft_mean_ms": _mean_ms(measured.in_process_s),
        "server_mean_ms": {k: _round(1000 * s) for k, s in measured.server_mean_s.items()},
        "num_prompts": len(overhead_ms),
    }


def _mean_ms(seconds: list[float]) -> float:
    return _round(1000 * sum(seconds) / len(seconds))


def _round(value: float) -> float:
    return float(round(value, 3))


def make_table(result: dict[str, Any], prompt_tokens: int) -> Table:
    """One row per figure, milliseconds."""
    from rich.table import Table

    table = Table("ms", title=f"TTFT of prompts of {prompt_tokens} tokens on an idle server")
    for heading in ("p50", "p99", "mean"):
        table.add_column(heading, justify="right")
    for name, label in (("client_ttft", "at the client"), ("in_process_ttft", "in the process")):
        cells = (f"{result[f'{name}_{key}_ms']:.2f}" for key in ("p50", "p99", "mean"))
        table.add_row(label, *cells)
    overheads = (f"{result[key]:.2f}" for key in ("overhead_p50_ms", "overhead_p99_ms"))
    table.add_row("overhead", *overheads, "")
    for name, mean_ms in result["server_mean_ms"].items():
        table.add_row(f"of it in the server: {name}", "", "", f"{mean_ms:.2f}")
    return table
