"""Runs `flowprefill serve`: tritonserver and, in front of it, the OpenAI endpoint, until a signal
asks for a stop or one of them cannot do its work any more; shows what tritonserver logs.
"""

from __future__ import annotations

import threading

import typer
from rich.console import Console

from flowprefill.errors import ServerStartError
from flowprefill.openai.process import OpenAIProcess
from flowprefill.server import TritonServer
from flowprefill.server_log import ServerLog, parse_line
from flowprefill.stop_signals import StopSignals
from flowprefill.stub_watch import StubWatch

_LOOK_S = 0.2
_OWN = "[flowprefill] "
"""What the backend's lines begin with."""


class LogView:
    """What is shown of a server's log: warnings, errors and the backend's lines, or everything."""

    def __init__(self, log: ServerLog, verbose: bool) -> None:
        self.console = Console(stderr=True, highlight=False)
        self._log = log
        self._verbose = verbose

    def say(self, line: str) -> None:
        """A line as it is: to a file rich would break it after 80 characters."""
        self.console.out(line, highlight=False)

    def show_new(self) -> None:
        """Show what was logged since the last time."""
        for line in self._log.new_lines():
            message = parse_line(line)
            if self._verbose or (message and (message.level != "I" or _OWN in message.text)):
                self.say(line)

    def start(self, server: TritonServer, timeout_s: float, stopping: threading.Event) -> None:
        """Start `server` and wait until it is ready, with its progress in one line."""
        with self.console.status("starting tritonserver") as status:

            def show(line: str) -> None:
                if self._verbose:
                    self.say(line)
                elif f"{_OWN}loading" in line:
                    status.update(line.split(_OWN, 1)[1].rstrip('"'))

            server.start()
            server.wait_ready(timeout_s, show, stopping)


def run_server(
    server: TritonServer,
    signals: StopSignals,
    load_timeout_s: float,
    verbose: bool,
    openai: OpenAIProcess | None,
) -> bool:
    """Run until a signal asks for a stop. Returns whether everything ended by itself.

    Raises ServerStartError, once all has ended, if something did not start or could not go on.
    """
    stopping = signals.stopping
    view = LogView(server.log, verbose)
    try:
        view.start(server, load_timeout_s, stopping)
        if openai and not stopping.is_set():
            openai.start(stopping)
        if server.is_alive() and not stopping.is_set():
            typer.echo(ready_text(server, openai))
        reason = _watch(server, stopping, openai, view)
        if reason is not None:
            raise ServerStartError(reason)
        view.say("stopping")
    finally:
        if openai:
            openai.drain()  # first, for a request that it still passed on would only be refused
        is_clean = server.stop(signals.forced)
        is_openai_clean = openai.stop(signals.forced) if openai else True
        view.show_new()
    if not is_clean:
        view.say(f"error: {server.stop_problem}")
    if not is_openai_clean:
        view.say("error: the OpenAI endpoint had to be killed, or failed")
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


def _watch(
    server: TritonServer,
    stopping: threading.Event,
    openai: OpenAIProcess | None,
    view: LogView,
) -> str | None:
    """Show the log until a signal comes: None; or until there is no going on: why."""
    stubs = StubWatch(server.pid)
    while not stopping.wait(_LOOK_S):
        view.show_new()
        reason = _why_over(server, openai, view, stubs)
        if reason is not None and not stopping.is_set():
            return reason
    return None


def _why_over(
    server: TritonServer, openai: OpenAIProcess | None, view: LogView, stubs: StubWatch
) -> str | None:
    if not server.is_alive():
        server.log.finish()
        view.show_new()
        last_line = server.log.text().rstrip().rsplit("\n", 1)[-1]
        return f"tritonserver ended by itself; its last line: {last_line}"
    if openai and not openai.tend():
        return "the OpenAI endpoint died too often"
    if server.has_failed_engine:
        return "a model's engine failed for good; only a new server can serve it"
    if stubs.has_dead_stub():
        return "a model's process died; only a new server can serve it"
    return None
