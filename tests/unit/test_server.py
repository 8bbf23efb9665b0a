"""Start-up of tritonserver: what it finds, refuses, lays out, sweeps. No server runs here."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import shutil
import socket
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from flowprefill.errors import ServerStartError
from flowprefill.preflight import check_venv, find_libpython, python_minor
from flowprefill.server import ServerOptions, TritonServer, check_ports
from flowprefill.server_layout import (
    SHM_DIR,
    Installation,
    ShmNamespace,
    find_installation,
    lay_out_backends,
    sweep_shm,
    write_backend,
)
from flowprefill.server_log import ServerLog

ROOT = Path(__file__).parents[2]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tritonserver on PATH, laid out as in NVIDIA's image."""
    python_dir = tmp_path / "backends" / "python"
    python_dir.mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    binary = tmp_path / "bin" / "tritonserver"
    binary.write_text("")
    binary.chmod(0o755)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (python_dir / name).write_text(name)
    stub = python_dir / "triton_python_backend_stub"
    stub.write_bytes(b"\x7fELF..libpython" + python_minor().encode() + b".so.1.0\0")
    monkeypatch.setenv("PATH", str(binary.parent))
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
            check_ports(ServerOptions(Path(), grpc_port=port, http_port=0, metrics_port=0))


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
    namespace = ShmNamespace()
    region = SHM_DIR / f"{namespace.prefix}region"
    region.write_text("in use")
    try:
        sweep_shm()
        assert region.exists()
    finally:
        namespace.release()
    assert not list(SHM_DIR.glob(f"{namespace.prefix}*"))


def test_sweep_removes_what_a_killed_server_left() -> None:
    code = (
        "import os, signal; from flowprefill.server_layout import *; n = ShmNamespace();"
        "(SHM_DIR / (n.prefix + 'region')).write_text('x'); print(n.prefix, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    prefix = done.stdout.strip()
    assert (SHM_DIR / f"{prefix}region").exists()
    sweep_shm()
    assert not list(SHM_DIR.glob(f"{prefix}*"))


LOAD_FAILURE = r"""
I1129 23:58:44.1 16605 model_lifecycle.cc:472] "loading: m1:1"
E1129 23:58:44.2 16605 server.cc:241] "CudaDriverHelper has not been initialized."
E1129 23:58:44.3 16605 model_lifecycle.cc:642] "failed to load 'm1' version 1: Internal: KeyError: 'nokey'\n\nAt:\n  /x/model.py(6): initialize\n"
error: creating server: Internal - failed to load all models
"""  # noqa: E501


def test_failure_reason_is_the_model_s_own_in_one_line(tmp_path: Path) -> None:
    log = ServerLog()
    (tmp_path / "log").write_text(LOAD_FAILURE)
    log.follow(tmp_path / "log")
    assert log.failure_reason() == "failed to load 'm1' version 1: Internal: KeyError: 'nokey'"


def test_log_gives_whole_lines_once_and_outlives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\ntw")
    log = ServerLog()
    log.follow(path)
    assert log.new_lines() == ["one"]
    with path.open("a") as file:
        file.write("o\n")
    assert log.new_lines() == ["two"]
    log.close()
    path.unlink()
    assert log.text() == "one\ntwo\n"
