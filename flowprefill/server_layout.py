"""Where tritonserver is, what its backend directory must hold, and which files one server makes.

Two installations are known: a tritonserver on PATH (NVIDIA's container) and the one inside the
nvidia-pytriton wheel. Both end as one `Installation`; nothing after that differs.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flowprefill.errors import ServerStartError
from flowprefill.preflight import check_python, find_libpython, python_minor

BACKEND_NAMES = ("flowprefill", "vllm")
"""The backend answers to both: repositories written for vllm_backend load unchanged."""
SHM_DIR = Path("/dev/shm")
FILE_PREFIX = "flowprefill_"

_STUB = "triton_python_backend_stub"
_MODEL_PY = "from flowprefill_backend.triton_model import TritonPythonModel\n"
"""The import of backend/model.py, which no wheel can carry: it would install a module `model`."""


@dataclass(frozen=True)
class Installation:
    """One usable tritonserver."""

    binary: Path
    backends: Path
    """Its own backend directory; holds python/."""
    stub: Path
    """triton_python_backend_stub of the running Python minor."""
    library_dirs: tuple[Path, ...]
    """What must be on LD_LIBRARY_PATH."""


def find_installation() -> Installation:
    """The tritonserver on PATH, else the one of nvidia-pytriton.

    Raises ServerStartError, in one line, if there is none or it cannot work with this Python.
    """
    check_python()
    _check_numpy()
    libpython_dir = find_libpython()
    library_dirs = (libpython_dir,) if libpython_dir else ()
    on_path = shutil.which("tritonserver")
    if on_path:
        binary = Path(on_path).resolve()
        backends = binary.parent.parent / "backends"
        stub = backends / "python" / _STUB
    else:
        spec = importlib.util.find_spec("pytriton")
        if spec is None or spec.origin is None:
            raise ServerStartError(
                "no tritonserver: none is on PATH and nvidia-pytriton is not installed "
                "(pip install 'flowprefill[server]')"
            )
        package = Path(spec.origin).parent
        binary = package / "tritonserver" / "bin" / "tritonserver"
        backends = package / "tritonserver" / "backends"
        stub = package / "tritonserver" / "python_backend_stubs" / python_minor() / _STUB
        library_dirs = (package.parent / "nvidia_pytriton.libs", *library_dirs)
    _check_stub(stub)
    return Installation(binary, backends, stub, library_dirs)


def lay_out_backends(installation: Installation, target: Path) -> Path:
    """Return a backend directory that holds python/ and ours.

    A container built with our backend in place (docker/Dockerfile) is used as it is, so its other
    backends stay available. Otherwise the files are copied to `target`: tritonserver refuses links
    that lead out of its backend directory, and a wheel's directory is not ours to write to.
    """
    if (installation.backends / BACKEND_NAMES[0] / "model.py").is_file():
        return installation.backends
    python_dir = target / "python"
    python_dir.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        shutil.copy2(installation.backends / "python" / name, python_dir)
    shutil.copy2(installation.stub, python_dir)
    for name in BACKEND_NAMES:
        write_backend(target / name)
    return target


def write_backend(directory: Path) -> None:
    """Write the backend's only file. The code itself is imported from the installed package: a
    second copy of it on the stub's path would be shadowed by the first anyway."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.py").write_text(_MODEL_PY, encoding="utf-8")


def default_model_repository() -> Path:
    """./model_repository, else the one beside the source tree of an editable install."""
    beside_source = Path(__file__).resolve().parent.parent / "model_repository"
    for candidate in (Path("model_repository"), beside_source):
        if candidate.is_dir():
            return candidate
    raise ServerStartError("no ./model_repository here: name one with --model-repository")


def _check_numpy() -> None:
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise ServerStartError(
            f"numpy {version} kills tritonserver's Python stub: pip install 'numpy<2'"
        )


def _check_stub(stub: Path) -> None:
    """A stub embeds exactly one CPython minor; the name of the libpython it links tells which."""
    wanted = python_minor()
    if not stub.is_file():
        raise ServerStartError(f"tritonserver has no Python stub for CPython {wanted} at {stub}")
    linked = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    if linked and linked.group(1).decode() != wanted:
        raise ServerStartError(
            f"tritonserver's Python stub is for CPython {linked.group(1).decode()}, "
            f"this is {wanted}: {stub}"
        )


class ServerFiles:
    """What one server has in /dev/shm, by a common prefix, and a directory of that name in /tmp.

    A lock file of the same name is held open by the launcher and, by inheritance, by tritonserver
    and its stubs. So "is anyone still using this?" is answered by the kernel, without process ids,
    which may be reused or belong to another container that shares /dev/shm.
    """

    def __init__(self) -> None:
        """Sweep what dead servers left, then take a new prefix."""
        sweep_dead_servers()
        while True:
            self.prefix = FILE_PREFIX + secrets.token_hex(4)
            self._lock = SHM_DIR / f"{self.prefix}.lock"
            self.fd = os.open(self._lock, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self.fd, fcntl.LOCK_EX)
            if os.fstat(self.fd).st_nlink:  # else another start swept it before it was locked
                break
            os.close(self.fd)
        self.run_dir = _run_dir(self.prefix)
        self.run_dir.mkdir(mode=0o700)

    def release(self) -> list[str]:
        """Remove everything with this prefix. Call once no process of the server is left.

        Returns the names in /dev/shm that the server itself should have removed.
        """
        left = sorted({path.name for path in SHM_DIR.glob(f"{self.prefix}*")} - {self._lock.name})
        _remove_files(self.prefix)
        os.close(self.fd)
        return left


def sweep_dead_servers() -> None:
    """Remove the files of servers that no longer run; live ones hold their lock."""
    for lock in SHM_DIR.glob(f"{FILE_PREFIX}*.lock"):
        try:
            fd = os.open(lock, os.O_RDWR)
        except OSError:
            continue  # gone meanwhile, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove_files(lock.stem)
        except BlockingIOError:
            pass
        finally:
            os.close(fd)


def _remove_files(prefix: str) -> None:
    shutil.rmtree(_run_dir(prefix), ignore_errors=True)
    for path in SHM_DIR.glob(f"{prefix}*"):  # the lock is one of them, so they come last
        path.unlink(missing_ok=True)


def _run_dir(prefix: str) -> Path:
    return Path(tempfile.gettempdir()) / prefix
