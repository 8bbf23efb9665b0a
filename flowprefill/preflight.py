"""What this Python must have before a tritonserver can run on it.

Standard library only: `make` runs it before the environment exists
(`python -m flowprefill.preflight`), and the server start-up once more.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import platform
import sys
import sysconfig
from pathlib import Path

from flowprefill.errors import ServerStartError

SUPPORTED_MINORS = (10, 11, 12)
"""CPython 3.x with a tritonserver stub, wheels of numpy < 2, and tests."""


def python_minor() -> str:
    """Version of the running interpreter as the stubs name it, for example "3.11"."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def check_python() -> None:
    """Raise ServerStartError unless this interpreter can be used at all."""
    if platform.python_implementation() != "CPython" or sys.version_info[1] not in SUPPORTED_MINORS:
        raise ServerStartError(
            f"CPython 3.10, 3.11 or 3.12 is needed, this is {platform.python_implementation()} "
            f"{python_minor()} ({sys.executable}); try `make PYTHON=python3.11`"
        )


def check_venv() -> None:
    """Raise ServerStartError if `python -m venv` would fail: Debian ships ensurepip separately."""
    if importlib.util.find_spec("ensurepip") is None:
        raise ServerStartError(
            f"{sys.executable} cannot create environments: "
            f"apt-get install python{python_minor()}-venv libpython{python_minor()}"
        )


def find_libpython() -> Path | None:
    """Directory of libpython3.X.so.1.0; None if the loader finds the library by itself.

    tritonserver's Python stub links it, while a CPython executable may be linked statically.
    Raises ServerStartError if there is none.
    """
    name = f"libpython{python_minor()}.so.1.0"
    lib = Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent")
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    for directory in (lib, lib / multiarch, Path(sys.base_prefix) / "lib"):
        if (directory / name).is_file():
            return directory
    if ctypes.util.find_library(f"python{python_minor()}") == name:
        return None
    raise ServerStartError(
        f"{name} is missing, tritonserver's Python stub needs it: "
        f"apt-get install libpython{python_minor()} (or a CPython built with --enable-shared)"
    )


def main() -> int:
    """Check everything that can be checked before anything is installed; one line per failure."""
    try:
        check_python()
        check_venv()
        find_libpython()
    except ServerStartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
