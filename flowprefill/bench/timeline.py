"""`flowprefill timeline`: what a running server's engine does, second by second, as two files."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import finite
from flowprefill.bench.report import BenchmarkError
from flowprefill.timeline import Timeline, gather

if TYPE_CHECKING:
    from rich.console import Console

    from flowprefill_client import Client


def run(
    url: Annotated[str, typer.Option(help="The server's gRPC endpoint, host:port.")] = (
        "localhost:8001"
    ),
    model: Annotated[str, typer.Option(help="Its name on the server.")] = "smollm2",
    seconds: Annotated[
        float, typer.Option(min=0.1, max=60.0, callback=finite, help="Record so long.")
    ] = 10.0,
    out: Annotated[Path, typer.Option(help="Folder for the files; it is made.")] = Path("timeline"),
) -> None:
    """Record what a running server's engine does, and which requests it does it for.

    Writes timeline.html, one page for any browser, and timeline.json for https://ui.perfetto.dev.
    Ctrl-C ends the recording early. One that breaks off is written as far as it goes: exit code 1.
    """
    from rich.console import Console

    from flowprefill.bench.plots.chrome_trace import write_chrome_trace
    from flowprefill.bench.plots.timeline_page import write_timeline_page
    from flowprefill_client import Client

    console = Console(stderr=True, highlight=False)
    with Client(url, model) as client:
        timeline = gather(_record(client, url, seconds, console))
    facts = {"model": model, **timeline.facts}
    write_chrome_trace(out / "timeline.json", timeline.runs, timeline.spans, facts)
    write_timeline_page(out / "timeline.html", model, timeline)
    typer.echo(summary(timeline))
    typer.echo(f"{out / 'timeline.html'}\n{out / 'timeline.json'}")
    if timeline.end == "broken":
        raise typer.Exit(1)


def summary(timeline: Timeline) -> str:
    """One line: how long, how many requests, how many of them on time, how busy the device was."""
    answered = [span for span in timeline.spans if span.first_token_s <= timeline.to_s]
    num_on_time = sum(span.is_on_time for span in answered)
    busy_s = sum(run.end_s - run.start_s for run in timeline.runs)
    length_s = timeline.to_s - timeline.from_s
    cut = "" if timeline.end == "time" else f" (ended early: {timeline.end})"
    return (
        f"{length_s:.1f} s{cut}: {len(timeline.spans)} requests, {len(answered)} with a first "
        f"token, {num_on_time} of those on time; device busy {busy_s / length_s:.0%}"
    )


def _record(client: Client, url: str, seconds: float, console: Console) -> list[dict[str, Any]]:
    """At least one part. What breaks off is kept. Raises BenchmarkError if nothing comes."""
    from flowprefill_client import ServerError

    recording = client.record_timeline(seconds)
    parts: list[dict[str, Any]] = []
    while not parts or not parts[-1]["end"]:
        try:
            parts.append(next(recording))
            if len(parts) == 1:
                console.print(f"recording {seconds:g} s, Ctrl-C ends it")
                _end_at_interrupt(client)
        except (ServerError, StopIteration) as error:
            why = str(error) or "no answer"
            if not parts:
                raise BenchmarkError(f"{url}: {why}") from error
            console.print(f"the recording broke off: {why}", markup=False)
            break
    return parts


def _end_at_interrupt(client: Client) -> None:
    """At the first Ctrl-C have the last part sent; a second one is as usual."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not here: the interrupted code may hold what another call needs.
        threading.Thread(target=client.end_timeline, daemon=True).start()

    signal.signal(signal.SIGINT, end)
