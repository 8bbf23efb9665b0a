"""Start-up of tritonserver: what it finds, refuses, lays out, sweeps. No server runs here."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowprefill.errors import ServerStartError
from flowprefill.preflight import check_venv, find_libpython, python_minor
from flowprefill.server import ServerOptions, TritonServer, check_ports, free_ports, is_loopback
from flowprefill.server_layout import (
    SHM_DIR,
    Installation,
    ServerFiles,
    find_installation,
    lay_out_backends,
    sweep_dead_servers,
    write_backend,
)
from flowprefill.server_log import ServerLog, stopped_line, stopping_line
from tests.stand_in_tritonserver import lay_out_tritonserver

ROOT = Path(__file__).parents[2]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tritonserver on PATH, laid out as in NVIDIA's image."""
    monkeypatch.setenv("PATH", str(lay_out_tritonserver(tmp_path).parent))
    return tmp_path


def test_tritonserver_on_path_is_preferred(container: Path) -> None:
    installation = find_installation()
    assert installation.binary == container / "bin" / "tritonserver"
    assert installation.backends == container / "backends"


def test_stub_of_another_python_is_refused_naming_both(container: Path) -> None:
    stub = container / "backends" / "python" / "triton_python_backend_stub"
    stub.write_bytes(b"\x7fELF..libpython3.8.so.1.0\0")
    with pytest.raises(ServerStartError, match=rf"for CPython 3\.8, this is {python_minor()}"):
        find_installation()


def test_missing_stub_names_the_python_version(container: Path) -> None:
    (container / "backends" / "python" / "triton_python_backend_stub").unlink()
    with pytest.raises(ServerStartError, match=f"no Python stub for CPython {python_minor()}"):
        find_installation()


def test_no_tritonserver_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerStartError, match="nvidia-pytriton is not installed"):
        find_installation()


def test_numpy_2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(ServerStartError, match=r"numpy 2\.1\.0 kills"):
        find_installation()


def test_missing_libpython_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(ServerStartError, match=f"apt-get install libpython{python_minor()}"):
        find_libpython()


def test_missing_ensurepip_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServerStartError, match=f"apt-get install python{python_minor()}-venv"):
        check_venv()


def test_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} on 127.0.0.1: .*in use"):
            check_ports("127.0.0.1", 0, port, 0)


def test_port_for_two_purposes_is_named() -> None:
    port, other = free_ports(2)
    with pytest.raises(ServerStartError, match=f"port {port} on 127.0.0.1: asked for twice"):
        check_ports("127.0.0.1", port, other, port)
    check_ports("127.0.0.1", port, other)


def test_missing_model_repository_is_named(tmp_path: Path) -> None:
    server = TritonServer(ServerOptions(tmp_path / "nowhere"))
    with pytest.raises(ServerStartError, match="nowhere"):
        server.start()
    assert server.stop() is False  # harmless without a process


def test_layout_holds_copies_and_both_names(container: Path, tmp_path: Path) -> None:
    backends = lay_out_backends(find_installation(), tmp_path / "private")
    assert backends == tmp_path / "private"
    files = {str(path.relative_to(backends)) for path in backends.rglob("*") if path.is_file()}
    assert files == {
        "python/libtriton_python.so",
        "python/triton_python_backend_utils.py",
        "python/triton_python_backend_stub",
        "flowprefill/model.py",
        "vllm/model.py",
    }
    assert not any(path.is_symlink() for path in backends.rglob("*"))


def test_container_with_our_backend_keeps_its_own_directory(
    container: Path, tmp_path: Path
) -> None:
    write_backend(container / "backends" / "flowprefill")
    backends = lay_out_backends(find_installation(), tmp_path / "private")
    assert backends == container / "backends"
    assert not (tmp_path / "private").exists()


def test_written_model_py_imports_what_the_repository_s_does(tmp_path: Path) -> None:
    write_backend(tmp_path)
    written = (tmp_path / "model.py").read_text().strip()
    assert written in (ROOT / "backend" / "model.py").read_text().splitlines()


def test_wheel_installation_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    installation: Installation = find_installation()
    assert installation.binary.is_file() and installation.stub.is_file()
    assert all(directory.is_dir() for directory in installation.library_dirs)


def test_sweep_spares_living_servers() -> None:
    files = ServerFiles()
    region = SHM_DIR / f"{files.prefix}region"
    region.write_text("in use")
    try:
        sweep_dead_servers()
        assert region.exists() and files.run_dir.is_dir()
    finally:
        files.release()
    assert not list(SHM_DIR.glob(f"{files.prefix}*"))
    assert not files.run_dir.exists()


def test_what_the_server_left_is_told_when_it_is_removed() -> None:
    clean, left = ServerFiles(), ServerFiles()
    region = SHM_DIR / f"{left.prefix}region"
    region.write_text("of a process that did not remove it")
    assert clean.release() == []
    assert left.release() == [region.name]
    assert not region.exists()


def test_sweep_removes_what_a_killed_server_left() -> None:
    code = (
        "import os, signal; from flowprefill.server_layout import *; f = ServerFiles();"
        "(SHM_DIR / (f.prefix + 'region')).write_text('x'); (f.run_dir / 'file').write_text('x');"
        "print(f.prefix, f.run_dir, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    prefix, run_dir = done.stdout.split()
    assert (SHM_DIR / f"{prefix}region").exists() and Path(run_dir, "file").exists()
    sweep_dead_servers()
    assert not list(SHM_DIR.glob(f"{prefix}*"))
    assert not Path(run_dir).exists()


@pytest.fixture
def arguments_of(container: Path, tmp_path: Path) -> Callable[..., str]:
    """Start a tritonserver that prints its arguments and ends; returns what it printed."""
    (container / "bin" / "tritonserver").write_text('#!/bin/sh\necho "args: $*"\nexit 1\n')

    def start(**options: Any) -> str:
        ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
        server = TritonServer(ServerOptions(tmp_path, **ports, **options))
        try:
            server.start()
            with pytest.raises(ServerStartError, match=r"^args: "):
                server.wait_ready(10)
        finally:
            server.stop()
        return server.log.text()

    return start


def test_clients_on_other_machines_cannot_load_models_unless_told_so(
    arguments_of: Callable[..., str],
) -> None:
    assert "--model-control-mode=none" in arguments_of(host="0.0.0.0")
    assert "--model-control-mode=explicit" in arguments_of(host="127.0.0.1")
    assert "--model-control-mode=explicit" in arguments_of(host="0.0.0.0", allow_model_control=True)


@pytest.mark.parametrize(
    ("host", "is_ours_alone"),
    [("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True)]
    + [(host, False) for host in ("0.0.0.0", "", "::", "192.168.1.7", "my-machine")],
)
def test_loopback_addresses_are_told_from_others(host: str, is_ours_alone: bool) -> None:
    assert is_loopback(host) is is_ours_alone


@pytest.mark.parametrize("host", ["::1", "::", "[::1]"])
def test_an_address_that_tritonserver_cannot_listen_on_is_named(host: str) -> None:
    with pytest.raises(ServerStartError, match=r"^host='.*': must be an IPv4 address or a name$"):
        ServerOptions(Path(), host=host)


def test_a_name_is_turned_into_the_address_that_tritonserver_understands(
    arguments_of: Callable[..., str],
) -> None:
    arguments = arguments_of(host="localhost")
    for option in ("http", "grpc", "metrics"):
        assert f"--{option}-address=127.0.0.1 " in arguments
    assert "--model-control-mode=explicit" in arguments


def test_a_name_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ServerStartError, match=r"^host='xxxx.*': no IPv4 address of that name"):
        ServerOptions(Path(), host="x" * 70)
    monkeypatch.setattr(socket, "gethostbyname", unknown)
    with pytest.raises(ServerStartError, match=r"^host='nowhere': .*Name or service not known"):
        ServerOptions(Path(), host="nowhere")


@pytest.mark.parametrize(
    "argument", ["--log-info=false", "--log-error=0", "--log-file=/tmp/log", "--log-format=ISO8601"]
)
def test_arguments_that_would_take_lines_from_the_log_are_refused(argument: str) -> None:
    with pytest.raises(ServerStartError, match=f"^{argument}: .*; --verbose shows all of it$"):
        ServerOptions(Path(), extra_args=("--log-verbose=1", argument))
    ServerOptions(Path(), extra_args=("--log-verbose=1",))


def write_log(log: ServerLog, text: str) -> None:
    """Let `log` read `text` from a pipe that ends after it."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdin and writer.stdout
        log.follow(writer.stdout)
        writer.stdin.write(text.encode())
        writer.stdin.close()
        log.finish()


LOAD_FAILURE = r"""
I1129 23:58:44.1 16605 model_lifecycle.cc:472] "loading: m1:1"
E1129 23:58:44.2 16605 server.cc:241] "CudaDriverHelper has not been initialized."
E1129 23:58:44.3 16605 model_lifecycle.cc:642] "failed to load 'm1' version 1: Internal: KeyError: 'nokey'\n\nAt:\n  /x/model.py(6): initialize\n"
error: creating server: Internal - failed to load all models
"""  # noqa: E501


def test_failure_reason_is_the_model_s_own_in_one_line() -> None:
    log = ServerLog()
    write_log(log, LOAD_FAILURE)
    assert log.failure_reason() == "failed to load 'm1' version 1: Internal: KeyError: 'nokey'"


def test_log_gives_each_line_once_and_keeps_it() -> None:
    log = ServerLog()
    write_log(log, "one\ntwo\nlast words without an end")
    assert log.new_lines() == ["one", "two", "last words without an end"]
    assert log.new_lines() == []
    assert log.text() == "one\ntwo\nlast words without an end\n"


def test_log_keeps_the_last_million_characters() -> None:
    log = ServerLog()
    write_log(log, "".join(f"{i:09d}\n" for i in range(300_000)))
    assert len(log.text()) == 1_000_000
    assert log.text().endswith("000299999\n")
    assert len(log.new_lines()) == 100_000


def logged(*messages: str) -> str:
    """The messages as tritonserver logs them."""
    return "".join(f'I1130 09:56:25.723907 3342 server.cc:345] "{text}"\n' for text in messages)


NO_REQUEST = "Timeout 0: Found 0 model versions that have in-flight inferences"
ONE_REQUEST = "Timeout 0: Found 1 model versions that have in-flight inferences"
OUT_OF_TIME = "failed to stop server: Internal - Exit timeout expired. Exiting immediately."
STOPPING = stopping_line("m_0_0")
ANSWERED = stopped_line("m_0_0", 0)


@pytest.mark.parametrize(
    ("code", "messages"),
    [
        (0, []),
        (-signal.SIGTERM, []),
        (0, [STOPPING, NO_REQUEST, ANSWERED]),
        (1, [STOPPING, ANSWERED, NO_REQUEST, OUT_OF_TIME]),
        (1, [STOPPING, ONE_REQUEST, NO_REQUEST, ANSWERED, OUT_OF_TIME]),
    ],
)
def test_a_stop_after_which_all_is_answered_is_no_problem(code: int, messages: list[str]) -> None:
    log = ServerLog()
    write_log(log, logged(*messages))
    assert log.stop_problem(code) is None


@pytest.mark.parametrize(
    ("code", "messages", "problem"),
    [
        (0, [STOPPING, NO_REQUEST, stopped_line("m_0_0", 2)], "cut short at the exit timeout: 2"),
        (0, [STOPPING, ANSWERED, STOPPING, stopped_line("m_0_0", 2)], "exit timeout: 2"),
        (0, [STOPPING, stopped_line("m_0_0", 2), STOPPING, ANSWERED], "exit timeout: 2"),
        (1, [STOPPING, NO_REQUEST, OUT_OF_TIME], "exit code 1"),
        (1, [STOPPING, STOPPING, ANSWERED, NO_REQUEST, OUT_OF_TIME], "exit code 1"),
        (1, [STOPPING, ANSWERED, stopping_line("m_0_1"), NO_REQUEST, OUT_OF_TIME], "exit code 1"),
        (1, [STOPPING, ANSWERED, ONE_REQUEST, OUT_OF_TIME], "exit code 1"),
        (1, [STOPPING, ANSWERED, NO_REQUEST], "exit code 1"),
        (1, [NO_REQUEST, OUT_OF_TIME], "exit code 1"),
        (1, [], "exit code 1"),
        (-signal.SIGSEGV, [STOPPING, ANSWERED, NO_REQUEST], "by signal 11"),
    ],
)
def test_a_stop_that_left_something_says_what(code: int, messages: list[str], problem: str) -> None:
    log = ServerLog()
    write_log(log, logged(*messages))
    found = log.stop_problem(code)
    assert found is not None and problem in found


def test_a_tritonserver_that_dies_while_it_stops_is_named(container: Path, tmp_path: Path) -> None:
    """Its log is all that the launcher has to tell a full stop from a broken one."""
    script = "#!/bin/sh\ntrap 'kill -SEGV $$' TERM\necho started\nwhile :; do sleep 0.1; done\n"
    (container / "bin" / "tritonserver").write_text(script)
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    server = TritonServer(ServerOptions(tmp_path, **ports))
    started = threading.Event()
    try:
        server.start()
        server.wait_ready(10, on_line=lambda line: started.set(), stopping=started)
        assert server.stop() is False
    finally:
        server.stop()
    assert server.stop_problem == "tritonserver ended by signal 11"


def test_a_forced_stop_waits_for_nothing(container: Path, tmp_path: Path) -> None:
    script = "#!/bin/sh\ntrap '' TERM\necho started\nwhile :; do sleep 0.1; done\n"
    (container / "bin" / "tritonserver").write_text(script)
    ports = dict(zip(("http_port", "grpc_port", "metrics_port"), free_ports(3), strict=True))
    server = TritonServer(ServerOptions(tmp_path, exit_timeout_s=600, **ports))
    started, forced = threading.Event(), threading.Event()
    try:
        server.start()
        prefix = server.shm_prefix
        server.wait_ready(10, on_line=lambda line: started.set(), stopping=started)
        forced.set()
        begin_s = time.monotonic()
        assert server.stop(forced) is False
        assert time.monotonic() - begin_s < 60
    finally:
        server.stop()
    assert server.stop_problem == "a second signal forced the stop"
    assert not list(SHM_DIR.glob(f"{prefix}*"))
