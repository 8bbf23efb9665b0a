"""The shared library of CPU kernels: compiled once from src/, found again, its functions typed.

`make setup` compiles it into this package, for the instructions that this processor has; a load
that finds none compiles it then. It needs a C++ compiler, x86-64 Linux, and AVX-512 or AVX2; where
one is missing, torch's operators take its place.
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
from typing import NamedTuple

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
    "-ffp-contract=off",  # the bits of a row must not depend on what the compiler fuses
    "-fno-math-errno",
    "-w",
)
_COMPILE_TIMEOUT_S = 300.0


class Instructions(NamedTuple):
    """What a library is compiled for."""

    flags: frozenset[str]
    """What a processor must have."""
    options: tuple[str, ...]
    """Of the compiler."""


AVX512 = Instructions(
    frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("-march=x86-64-v4", "-mavx512bf16"),  # only the bf16 kernels use what is beyond v4
)
AVX2 = Instructions(
    frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}), ("-march=x86-64-v3",)
)
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
    instructions = instructions_of(cpu_flags())
    path = _find(instructions) or compile_library(instructions)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # damaged, of another system, or where nothing may be executed
        raise NativeUnavailableError(f"the library cannot be loaded: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def instructions_of(flags: frozenset[str]) -> Instructions:
    """The widest that a processor with these flags has. Raises NativeUnavailableError."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NativeUnavailableError("they need x86-64 Linux")
    missing = sorted(AVX2.flags - flags)
    if missing:
        raise NativeUnavailableError(f"this processor has no {', '.join(missing)}")
    return AVX512 if flags >= AVX512.flags else AVX2


def compile_library(instructions: Instructions, directories: list[Path] | None = None) -> Path:
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
            return _compile_into(directory, instructions, [compiler, *command[1:]])
        except OSError as error:
            problems.append(str(error))
    raise NativeUnavailableError(f"the library cannot be kept anywhere: {'; '.join(problems)}")


def _compile_into(directory: Path, instructions: Instructions, compiler: list[str]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _name(instructions)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        built = Path(scratch, "library.so")
        command = [*compiler, *_OPTIONS, *instructions.options, "-o", str(built)]
        try:
            run = subprocess.run(
                [*command, str(_SOURCES / "library.cpp")],
                capture_output=True,
                text=True,
                timeout=_COMPILE_TIMEOUT_S,
                check=False,
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


def _find(instructions: Instructions) -> Path | None:
    paths = (directory / _name(instructions) for directory in _directories())
    return next(filter(Path.is_file, paths), None)


def _directories() -> Iterator[Path]:
    yield _PACKAGE / "lib"
    yield user_cache_directory("native")


@lru_cache
def source_digest(instructions: Instructions) -> str:
    """Names this build: sources and options."""
    digest = hashlib.sha256(" ".join((*_OPTIONS, *instructions.options)).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_name() -> str:
    """Of the library that this processor uses. Raises NativeUnavailableError."""
    return source_digest(instructions_of(cpu_flags()))


def _name(instructions: Instructions) -> str:
    return f"flowprefill-{source_digest(instructions)}.so"


def main(report: Callable[[str], None] = print) -> None:
    """Compile at set-up; where that cannot be, say so once and leave it to torch's operators."""
    try:
        instructions = instructions_of(cpu_flags())
        report(f"native CPU kernels: {_find(instructions) or compile_library(instructions)}")
    except NativeUnavailableError as error:
        report(f"native CPU kernels: none, torch's operators are used instead: {error}")


if __name__ == "__main__":
    main()
