"""`flowprefill serve` around a stand-in for tritonserver: what it shows, and when it ends."""

from __future__ import annotations

import contextlib
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import pytest

from flowprefill.errors import ServerStartError
from flowprefill.open_files import MAX_OPEN_FILES
from flowprefill.openai.process import OpenAIProcess
from flowprefill.serve import run_server
from flowprefill.server import ServerOptions, TritonServer, free_ports
from flowprefill.server_log import GAVE_UP_FILE, RUN_DIR_VARIABLE
from flowprefill.stop_signals import StopSignals
from flowprefill.supervision import Supervision
from tests.live_server import wait_for
from tests.stand_in_tritonserver import lay_out_tritonserver, stand_in

LONG_LINE = "x" * 200
WAITS = "time.sleep(600)"


def logged(text: str, level: str = "I") -> str:
    return f'{level}1130 09:56:25.723907 3342 model.py:345] "{text}"'


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Run a stand-in that logs a text, once it is ready, and then does something."""

    def run(log: str, then: str, signals: StopSignals, openai: OpenAIProcess | None = None) -> bool:
        binary = lay_out_tritonserver(tmp_path, stand_in(log, then))
        monkeypatch.setenv("PATH", str(binary.parent))
        ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
        options = ServerOptions(tmp_path, exit_timeout_s=0, **ports)
        return run_server(TritonServer(options), signals, 30, False, openai)

    return run


def test_a_server_whose_engine_was_given_up_ends_though_nothing_was_logged(
    serve: Callable[..., bool],
) -> None:
    leave = f"import os; open(os.environ[{RUN_DIR_VARIABLE!r}] + '/{GAVE_UP_FILE}', 'w').close()"
    with pytest.raises(ServerStartError, match="a model's engine failed for good"):
        serve("", f"{leave}\n{WAITS}", StopSignals())


def openai_endpoint(supervision: Supervision) -> OpenAIProcess:
    """One that finds no model server: it is not ready, and answers."""
    port, grpc_port = free_ports(2)
    return OpenAIProcess("127.0.0.1", port, f"127.0.0.1:{grpc_port}", 0, supervision=supervision)


def kill(openai: OpenAIProcess) -> int:
    """Returns the process id that it had."""
    assert openai._process is not None
    openai._process.kill()
    return openai._process.pid


def test_an_openai_endpoint_that_dies_is_replaced_and_tritonserver_goes_on(
    serve: Callable[..., bool], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    signals, openai = StopSignals(), openai_endpoint(Supervision(backoff_s=0.01))
    said_ready = tmp_path / "said-ready"

    def kill_then_stop() -> None:
        try:
            wait_for(said_ready.exists, 60)
            old = kill(openai)
            wait_for(lambda: openai._process and openai._process.pid != old and is_up(openai), 60)
        finally:
            signals.note(signal.SIGTERM, 0.0)

    thread = threading.Thread(target=kill_then_stop)
    thread.start()
    assert serve("", f"open({str(said_ready)!r}, 'w').close()\n{WAITS}", signals, openai) is True
    thread.join()
    warning, stopping = capfd.readouterr().err.splitlines()
    assert (warning.split(";")[0], stopping) == (
        "warning: the OpenAI endpoint was ended by signal 9",
        "stopping",
    )


def is_up(openai: OpenAIProcess) -> bool:
    with contextlib.suppress(OSError), urlopen(f"{openai.url}/models", timeout=5):
        return True
    return False


def test_a_server_whose_openai_endpoint_died_too_often_ends(
    serve: Callable[..., bool], tmp_path: Path
) -> None:
    openai = openai_endpoint(Supervision(max_deaths=1))
    said_ready = tmp_path / "said-ready"

    def kill_it() -> None:
        wait_for(said_ready.exists, 60)
        kill(openai)

    thread = threading.Thread(target=kill_it)
    thread.start()
    with pytest.raises(ServerStartError, match="the OpenAI endpoint died too often"):
        serve("", f"open({str(said_ready)!r}, 'w').close()\n{WAITS}", StopSignals(), openai)
    thread.join()


def test_what_a_server_logs_before_it_crashes_is_shown_in_whole_lines(
    serve: Callable[..., bool], capfd: pytest.CaptureFixture[str]
) -> None:
    last = logged(f"[flowprefill] {LONG_LINE}", "E")
    with pytest.raises(ServerStartError, match="ended by itself"):
        serve(f"{logged('nothing')}\n{last}", "raise SystemExit(1)", StopSignals())
    shown = capfd.readouterr().err.splitlines()
    assert last in shown and logged("nothing") not in shown


def test_what_a_server_logs_while_it_stops_is_shown(
    serve: Callable[..., bool],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    signals = StopSignals()
    last = logged("requests cut short: 2", "W")
    then = (
        f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(print({last!r}, flush=True)))\n"
        f"open({str(tmp_path / 'waits')!r}, 'w').close()\n{WAITS}"
    )

    def stop() -> None:
        wait_for(lambda: (tmp_path / "waits").exists())
        signals.note(signal.SIGTERM, 0.0)

    thread = threading.Thread(target=stop)
    thread.start()
    assert serve("begins", then, signals) is True
    thread.join()
    *_, stopping, shown = capfd.readouterr().err.splitlines()
    assert (stopping, shown) == ("stopping", last)


def test_the_limit_of_open_files_is_raised() -> None:
    code = (
        "import resource; from flowprefill.open_files import *; allow_many_files();"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    done = subprocess.run(
        [sys.executable, "-c", code], preexec_fn=few, stdout=subprocess.PIPE, check=True
    )
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    assert int(done.stdout) == wanted
