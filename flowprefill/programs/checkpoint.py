"""Checkpoint files: the tensors of a GGUF file or of a safetensors directory, read by row blocks.

Knows nothing of models: weights.py says which tensors it wants and where they go.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch
from torch import Tensor

from flowprefill.errors import ModelLoadError
from flowprefill.gguf_file import GgufFile

_FLOAT_DTYPES = ("BF16", "F16", "F32")


class Checkpoint(Protocol):
    """A file format: named tensors, readable by row blocks."""

    names: list[str]

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop of a matrix, or all of a vector, in any float dtype."""
        ...


@contextlib.contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open a .gguf file, or a directory with model.safetensors or its shards and their index.

    Raises ModelLoadError if a file is missing or broken.
    """
    with contextlib.ExitStack() as stack:
        if path.is_dir():
            yield _SafetensorsCheckpoint(path, stack)
        else:
            yield _GgufCheckpoint(path)


class _GgufCheckpoint:
    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self.names = list(self._file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[name].shape

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        if len(self.shape(name)) == 1:
            return torch.from_numpy(self._file.read_rows(name, 0, 1))[0, start:stop]
        return torch.from_numpy(self._file.read_rows(name, start, stop))


class _SafetensorsCheckpoint:
    """One model.safetensors, or the shards that model.safetensors.index.json lists."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._slices: dict[str, Any] = {}
        for path in _safetensors_files(directory):
            try:
                file = stack.enter_context(safetensors.safe_open(str(path), framework="pt"))
                self._slices |= {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, safetensors.SafetensorError) as error:
                raise ModelLoadError(f"{path}: not readable as safetensors: {error}") from error
        self.names = list(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slices[name].get_shape())

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        stored = self._slices[name]
        dtype = stored.get_dtype()
        if dtype not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"tensor {name} has dtype {dtype}; supported: {', '.join(_FLOAT_DTYPES)}"
            )
        rows: Tensor = stored[start:stop]
        return rows


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return [directory / "model.safetensors"]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index}: no weight_map of tensor names to files: {error}") from error
    return [directory / str(name) for name in names]
