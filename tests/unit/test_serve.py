"""`flowprefill serve` around a stand-in for tritonserver: what it shows, and when it ends."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flowprefill.errors import ServerStartError
from flowprefill.open_files import MAX_OPEN_FILES
from flowprefill.serve import LogView, run_server
from flowprefill.server import ServerOptions, TritonServer, free_ports
from flowprefill.server_log import ServerLog
from flowprefill.stop_signals import StopSignals
from flowprefill.supervision import GAVE_UP
from tests.live_server import wait_for
from tests.stand_in_tritonserver import lay_out_tritonserver, stand_in

LONG_LINE = "x" * 200
WAITS = "time.sleep(600)"


def logged(text: str, level: str = "I") -> str:
    return f'{level}1130 09:56:25.723907 3342 model.py:345] "{text}"'


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, str, StopSignals], bool]:
    """Run a stand-in that logs a text, once it is ready, and then does something."""

    def run(log: str, then: str, signals: StopSignals) -> bool:
        binary = lay_out_tritonserver(tmp_path, stand_in(log, then))
        monkeypatch.setenv("PATH", str(binary.parent))
        ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
        options = ServerOptions(tmp_path, exit_timeout_s=0, **ports)
        return run_server(TritonServer(options), signals, 30, False, None)

    return run


def test_a_server_whose_engine_failed_for_good_ends(
    serve: Callable[[str, str, StopSignals], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    line = logged(f"[flowprefill] the engine failed: {GAVE_UP}; last: killed by SIGKILL")
    with pytest.raises(ServerStartError, match="a model's engine failed for good"):
        serve(line, WAITS, StopSignals())
    assert line in capfd.readouterr().err.splitlines()


def test_an_engine_that_did_not_load_does_not_end_the_server() -> None:
    """Clients may load models that are broken."""
    view = LogView(ServerLog(), verbose=False)
    view.note(logged("[flowprefill] the engine failed: engine cannot load: no such file"))
    assert not view.has_failed_engine


def test_what_a_server_logs_before_it_crashes_is_shown_in_whole_lines(
    serve: Callable[[str, str, StopSignals], bool], capfd: pytest.CaptureFixture[str]
) -> None:
    last = logged(f"[flowprefill] {LONG_LINE}", "E")
    with pytest.raises(ServerStartError, match="ended by itself"):
        serve(f"{logged('nothing')}\n{last}", "raise SystemExit(1)", StopSignals())
    shown = capfd.readouterr().err.splitlines()
    assert last in shown and logged("nothing") not in shown


def test_what_a_server_logs_while_it_stops_is_shown(
    serve: Callable[[str, str, StopSignals], bool],
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
