"""`flowprefill replay`: a trace sent to a running server, each request at its own time."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import JsonOut, Seed, finite
from flowprefill.bench.progress import BenchProgress, bench_progress
from flowprefill.bench.report import VOID_EXIT_CODE, describe_run, load_model_json, print_json
from flowprefill.config import EngineConfig

if TYPE_CHECKING:
    from flowprefill.replay.plan import PlannedRequest
    from flowprefill.replay.records import ReplayRecord
    from flowprefill.replay.targets import Target
    from flowprefill.tokenizer import Tokenizer

_FACTS = ("cpu", "cpus", "model", "seed", "commit")
"""Of describe_run; what it says of the engine is the server's business here."""


class TargetKind(str, enum.Enum):
    """What is spoken with the server."""

    GRPC = "grpc"
    GENERATE_STREAM = "generate_stream"
    OPENAI = "openai"


def run(
    trace: Annotated[
        Path,
        typer.Option(help="Our CSV, or an original of QwenTrace, Mooncake, Azure 2023, BurstGPT."),
    ],
    target: Annotated[TargetKind, typer.Option(help="What the server speaks.")],
    url: Annotated[
        str,
        typer.Option(
            help="host:port, or for HTTP http://host:port; openai: also with the path of its API."
        ),
    ],
    model: Annotated[str, typer.Option(help="Its name on the server.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="The model's: .gguf, Hugging Face folder or package:NAME. Default: that of the "
            "model of this name in ./model_repository, or of the folder that --model is."
        ),
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="First request of the trace to send.")] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests to send; default: all from there.")
    ] = None,
    rate_scale: Annotated[
        float,
        typer.Option(min=1e-6, callback=finite, help="So many times as many requests per second."),
    ] = 1.0,
    length_scale: Annotated[
        float,
        typer.Option(min=1e-6, callback=finite, help="Prompts and answers so many times as long."),
    ] = 1.0,
    slo_scale: Annotated[
        float,
        typer.Option(
            min=1e-6,
            callback=finite,
            help="Times all objectives, which go by the recorded lengths.",
        ),
    ] = 1.0,
    max_input_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut longer prompts, after scaling.")
    ] = None,
    max_output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Cut longer answers, after scaling.")
    ] = None,
    output_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of every answer, whatever the trace says.")
    ] = None,
    spread_ticks: Annotated[
        bool,
        typer.Option(
            "--spread-ticks", help="Spread arrivals recorded in ticks, as Mooncake's, evenly."
        ),
    ] = False,
    new_tokens_only: Annotated[
        bool,
        typer.Option(
            "--new-tokens-only",
            help="QwenTrace: of a text request that follows another, only what it adds.",
        ),
    ] = False,
    send_slo: Annotated[
        bool, typer.Option("--send-slo", help="Send objectives to an openai target too.")
    ] = False,
    timeout_s: Annotated[
        float,
        typer.Option(
            min=0.001, callback=finite, help="A request without its end by then has failed."
        ),
    ] = 600.0,
    records: Annotated[
        Path | None, typer.Option(help="A row per request: .csv, or .parquet with pyarrow.")
    ] = None,
    seed: Seed = 0,
    json_out: JsonOut = None,
) -> None:
    """Send a trace to a running server and see which requests get their first token in time.

    Open loop: each request is sent when it is due, however slow the server is. Prompts have exactly
    the trace's token counts and share the beginnings that it says they share.

    TTFT counts from the moment of sending; when a request was due is in the records. If requests
    were sent more than 5 ms late (99th percentile) the replay is void: exit code 3. Ctrl-C cancels
    what runs and writes the records of what is complete: exit code 130.
    """
    from flowprefill.replay.record_files import check_records_path, write_records
    from flowprefill.replay.trace_plan import TraceOptions, read_plan

    if records:
        check_records_path(records)
    options = TraceOptions(
        trace, start, requests, rate_scale, length_scale, slo_scale, max_input_tokens,
        max_output_tokens, output_tokens, spread_ticks, new_tokens_only,
    )  # fmt: skip
    try:
        plan = read_plan(options)
        if plan.num_dropped:
            typer.echo(f"left out: {plan.num_dropped} failed requests of the trace", err=True)
        sender = _Sender(target, url, model, send_slo, timeout_s)
        ended = asyncio.run(sender.run(plan.requests, find_tokenizer(model, tokenizer), seed))
    except KeyboardInterrupt:  # before the first request
        raise typer.Exit(128 + signal.SIGINT) from None
    if records:
        write_records(records, ended.records)
    facts = describe_run(EngineConfig(model), seed)
    run_facts = {
        "target": target.value,
        "url": url,
        **dataclasses.asdict(options),
        "trace": trace.name,
        **{name: facts[name] for name in _FACTS},
    }
    is_void = _report(plan.requests, ended, run_facts, json_out)
    if ended.signum is not None:
        raise typer.Exit(128 + ended.signum)
    raise typer.Exit(VOID_EXIT_CODE if is_void else 0)


def find_tokenizer(model: str, tokenizer: str | None) -> Tokenizer:
    """The tokenizer named, or that of the model: a folder, or one of the model repository's.

    Raises ReplayError if there is none.
    """
    from flowprefill.replay.errors import ReplayError
    from flowprefill.server_layout import default_model_repository
    from flowprefill.tokenizer import Tokenizer, load_tokenizer

    if tokenizer is not None:
        return load_tokenizer(EngineConfig(model, tokenizer=tokenizer))
    if (Path(model) / "tokenizer.json").is_file():
        return Tokenizer.load(Path(model))
    model_json = default_model_repository() / model / "1" / "model.json"
    if not model_json.is_file():
        raise ReplayError(f"no tokenizer of model {model} is known: name one with --tokenizer")
    return load_tokenizer(load_model_json(model_json))


@dataclasses.dataclass(frozen=True)
class _Ended:
    """What came of a replay."""

    records: list[ReplayRecord]
    signum: int | None = None
    """The signal that ended it before its end."""


@dataclasses.dataclass(frozen=True)
class _Sender:
    """Everything that happens while an event loop runs."""

    kind: TargetKind
    url: str
    model: str
    send_slo: bool
    timeout_s: float

    async def run(self, plan: Sequence[PlannedRequest], tokenizer: Tokenizer, seed: int) -> _Ended:
        target = self._target()
        try:
            await target.check()
            messages = await _make_messages(plan, tokenizer, seed, target)
            with bench_progress(len(plan)) as progress:
                return await self._replay(plan, messages, target, progress)
        finally:
            await target.close()

    def _target(self) -> Target[Any]:
        from flowprefill.replay.http_targets import GenerateStreamTarget, OpenAITarget
        from flowprefill.replay.targets import GrpcTarget

        if self.kind is TargetKind.GRPC:
            return GrpcTarget(self.url, self.model)
        if self.kind is TargetKind.GENERATE_STREAM:
            return GenerateStreamTarget(self.url, self.model)
        return OpenAITarget(self.url, self.model, self.send_slo)

    async def _replay(
        self,
        plan: Sequence[PlannedRequest],
        messages: Sequence[Any],
        target: Target[Any],
        progress: BenchProgress,
    ) -> _Ended:
        from flowprefill.replay.run import Replayer

        signums: list[int] = []

        def stop(signum: int) -> None:
            signums.append(signum)
            replayer.stop()

        def show() -> None:
            num_ended = len(replayer.records)
            progress.describe(f"sent {replayer.num_sent}, {replayer.num_sent - num_ended} running")
            progress.advance_to(num_ended)

        replayer = Replayer(target, self.timeout_s, show)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, stop, signum)
        records = await replayer.run(plan, messages)
        return _Ended(records, signums[0] if signums else None)


async def _make_messages(
    plan: Sequence[PlannedRequest], tokenizer: Tokenizer, seed: int, target: Target[Any]
) -> list[Any]:
    from flowprefill.replay.prompts import PromptMaker

    maker = PromptMaker(tokenizer.encode, seed)
    messages = []
    with bench_progress(len(plan)) as progress:
        progress.describe("making prompts")
        for planned in plan:
            messages.append(target.prepare(planned, maker.make(planned)))
            progress.advance()
            await asyncio.sleep(0)  # Ctrl-C is heard here
    return messages


def _report(
    plan: Sequence[PlannedRequest], ended: _Ended, facts: dict[str, Any], json_out: Path | None
) -> bool:
    """Print the table, warnings and the JSON line; returns whether the replay is void."""
    from rich.console import Console

    from flowprefill.replay.summary import figures, make_table, server_line, warnings

    state = {"interrupted": ended.signum is not None, "run": facts}
    if not ended.records:
        print_json({"num_requests": 0, "void": True, **state}, json_out)
        return True
    console = Console()
    console.print(make_table(ended.records))
    result = figures(plan, ended.records)
    if line := server_line(result):
        console.print(line, markup=False)
    for code, number in result["errors"].items():
        console.print(f"failed with {code}: {number}", markup=False)
    for warning in warnings(result):
        console.print(warning, style="bold red", markup=False)
    print_json({**result, **state}, json_out)
    return bool(result["void"])
