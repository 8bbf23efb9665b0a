"""The shared library of CPU kernels: compiled once from src/, found again, its functions typed.

`make setup` compiles it into this package; a load that finds none compiles it then. It needs a C++
compiler, x86-64 Linux and AVX-512; where one is missing, torch's operators take its place.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from flowprefill.errors import FlowPrefillError
from flowprefill.host_cpu import cpu_flags
from flowprefill.user_cache import user_cache_directory

_PACKAGE = Path(__file__).parent
_SOURCES = _PACKAGE / "src"
_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = (
    "-O3",
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-march=x86-64-v4",  # AVX-512; only the bf16 kernels use what is beyond it
    "-mavx512bf16",
    "-ffp-contract=off",  # the bits of a row must not depend on what the compiler fuses
    "-fno-math-errno",
    "-w",
)
_COMPILE_TIMEOUT_S = 300.0
_FLAGS = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
BF16_FLAG = "avx512_bf16"
AMX_FLAG = "amx_bf16"


class NativeUnavailableError(FlowPrefillError):
    """There are no native kernels here; says why."""


class ModelShape(ctypes.Structure):
    """src/decoder.h, ModelShape."""

    _fields_ = (
        *[
            (name, ctypes.c_int32)
            for name in (
                "hidden",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "intermediate",
                "block_size",
            )
        ],
        ("eps", ctypes.c_float),
        ("query_scale", ctypes.c_float),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    )


class LayerPointers(ctypes.Structure):
    """src/decoder.h, LayerPointers."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in (
            "input_norm",
            "qkv",
            "qkv_bias",
            "q_norm",
            "k_norm",
            "o_proj",
            "post_norm",
            "gate_up",
            "down",
            "k_cache",
            "v_cache",
        )
    )


_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SLICES = [_POINTER, _INT, _POINTER, _INT]  # ends, number, interrupt, may_leave
_FUNCTIONS = {
    "flowprefill_open": (_POINTER, [_POINTER, _INT, _INT]),
    "flowprefill_close": (None, [_POINTER]),
    "flowprefill_qkv": (None, [*[_POINTER] * 6, _INT]),
    "flowprefill_attention": (None, [*[_POINTER] * 5, _INT, _INT]),
    "flowprefill_attention_slices": (_INT, [*[_POINTER] * 4, _LONG, *_SLICES]),
    "flowprefill_mlp": (_INT, [*[_POINTER] * 4, *_SLICES]),
    "flowprefill_layers": (None, [_POINTER, _POINTER, _INT, *[_POINTER] * 6, _INT]),
    "flowprefill_logits": (None, [*[_POINTER] * 3, _INT, _POINTER, _INT, _POINTER]),
}


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL:
    """The library, compiled if need be (some seconds). Raises NativeUnavailableError."""
    check_cpu(cpu_flags())
    path = _find() or compile_library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # damaged, of another system, or where nothing may be executed
        raise NativeUnavailableError(f"the library cannot be loaded: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def check_cpu(flags: frozenset[str]) -> None:
    """Raises NativeUnavailableError if this machine cannot run the kernels."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailableError("they need x86-64 Linux")
    missing = sorted(_FLAGS - flags)
    if missing:
        raise NativeUnavailableError(f"this processor has no {', '.join(missing)}")


def compile_library(directories: list[Path] | None = None) -> Path:
    """Compile into the first of the directories that can be written; returns the library's path.

    directories: None = this package, then the user's cache. Raises NativeUnavailableError.
    """
    command = shlex.split(os.environ.get("CXX", ""))  # as make reads it: `ccache g++`
    wanted = command[:1] or list(_COMPILERS)
    compiler = next(filter(shutil.which, wanted), None)
    if compiler is None:
        raise NativeUnavailableError(f"no C++ compiler is installed ({', '.join(wanted)})")
    problems = []
    for directory in directories or list(_directories()):
        try:
            return _compile_into(directory, [compiler, *command[1:]])
        except OSError as error:
            problems.append(str(error))
    raise NativeUnavailableError(f"the library cannot be kept anywhere: {'; '.join(problems)}")


def _compile_into(directory: Path, compiler: list[str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _name()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch, "library.so")
        command = [*compiler, *_OPTIONS, "-o", str(built), str(_SOURCES / "library.cpp")]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailableError(f"{compiler[0]} ran for {error.timeout:.0f} s") from error
        if run.returncode != 0:
            raise NativeUnavailableError(f"{compiler[0]} failed: {_reason(run)}")
        os.replace(built, target)  # others see all of it or nothing
    return target


def _reason(run: subprocess.CompletedProcess[str]) -> str:
    """The first error; before it come the files that were being read."""
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    return next((line for line in lines if "error" in line), lines[0])


def _find() -> Path | None:
    return next((p for d in _directories() if (p := d / _name()).is_file()), None)


def _directories() -> Iterator[Path]:
    yield _PACKAGE / "lib"
    yield user_cache_directory("native")


@lru_cache(maxsize=1)
def source_digest() -> str:
    """Names this build: sources and options."""
    digest = hashlib.sha256(" ".join(_OPTIONS).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _name() -> str:
    return f"flowprefill-{source_digest()}.so"


def main(report: Callable[[str], None] = print) -> None:
    """Compile at set-up; where that cannot be, say so once and leave it to torch's operators."""
    try:
        check_cpu(cpu_flags())
        report(f"native CPU kernels: {_find() or compile_library()}")
    except NativeUnavailableError as error:
        report(f"native CPU kernels: none, torch's operators are used instead: {error}")


if __name__ == "__main__":
    main()
