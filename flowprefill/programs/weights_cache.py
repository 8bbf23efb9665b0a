"""WeightsCache: weights on disk as they are in memory, so that only the first load dequantises.

One safetensors file for each key. A later load maps it: nothing is copied, and several processes
share the pages. The mapping is ours because the safetensors library makes one for the whole file,
which keeps all pages in memory until the last tensor is gone; here those of a layer go with it.
Knows tensors by name, not what they are for. A file that cannot be read, or is not what its name
says, is as good as none; so nothing that happens to this folder can fail a load.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from flowprefill.user_cache import (
    TEMPORARY_SUFFIX,
    make_directory,
    replacing,
    user_cache_directory,
)

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_DATA_ALIGNMENT = 64
"""Bytes. As torch aligns its own: tensors of real models are multiples of it and stay aligned."""
_ABANDONED_S = 3600.0
"""A temporary file that nobody has written to for so long belongs to a process that is gone."""


@dataclass(frozen=True)
class WeightsKey:
    """Everything that stored weights depend on."""

    path: str
    """The model file, absolute and without links."""
    size: int
    """Of the model file, bytes."""
    mtime_ns: int
    """When the model file was last written."""
    reader: str
    """What made tensors of the file, with its version."""
    variant: str
    """What was made of it: several may be in use at a time."""

    @staticmethod
    def of_file(path: Path, reader: str, variant: str) -> WeightsKey:
        """The key of the file as it is now. Raises OSError."""
        path = path.resolve(strict=True)
        status = path.stat()
        return WeightsKey(str(path), status.st_size, status.st_mtime_ns, reader, variant)


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.start + self.num_bytes

    def tensor(self, buffer: Any, buffer_start: int) -> Tensor:
        """The tensor in `buffer`, which holds the file from byte `buffer_start` on; no copy."""
        flat = torch.frombuffer(
            buffer,
            dtype=self.dtype,
            count=math.prod(self.shape),
            offset=self.start - buffer_start,
        )
        return flat.view(self.shape)


class WeightsCache:
    """A folder of weights."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @staticmethod
    def default_directory() -> Path:
        """Below the user's cache directory."""
        return user_cache_directory("weights")

    def load(self, key: WeightsKey) -> dict[str, Tensor] | None:
        """The tensors of exactly this key; None if there are none that can be used.

        Matrices are mapped, and writing to one changes only this process's copy. Those whose names
        are equal up to the last dot share a mapping, which lives as long as one of them.
        """
        try:
            with self.path(key).open("rb") as file:
                places = _read_header(file, key)
                return _read_vectors(file, places) | _map_matrices(file, places)
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None  # absent, unreadable, or no weights of ours

    def try_store(self, key: WeightsKey, tensors: Mapping[str, Tensor]) -> str | None:
        """Keep contiguous CPU tensors. Returns why not, if they were not kept.

        Other processes see all of it or nothing. Files of the same model that can never be used
        again are removed.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        try:
            make_directory(self.directory)
            self._remove_stale(key)
            free = shutil.disk_usage(self.directory).free
            if free < 2 * num_bytes:  # a second process may be at the same
                return f"{self.directory}: {2 * num_bytes} bytes are needed, {free} are free"
            with replacing(self.path(key)) as file:
                _write(file, key, tensors)
        except OSError as error:
            return str(error)
        return None

    def path(self, key: WeightsKey) -> Path:
        """The file of this key."""
        name = f"{_digest(key.path)}-{_version(key)}-{_digest(key.variant)}"
        return self.directory / f"{name}.safetensors"

    def _remove_stale(self, key: WeightsKey) -> None:
        """Remove what earlier versions of the model file left, and writers that were killed."""
        for path in self.directory.glob(f"{_digest(key.path)}-*"):
            with contextlib.suppress(OSError):  # in use on another machine, or gone already
                if path.suffix == TEMPORARY_SUFFIX:
                    is_stale = time.time() - path.stat().st_mtime > _ABANDONED_S
                else:
                    is_stale = path.name.split("-")[1] != _version(key)
                if is_stale:
                    path.unlink()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(key: WeightsKey) -> str:
    return _digest(f"{key.size} {key.mtime_ns} {key.reader}")


def _metadata(key: WeightsKey, entries: Mapping[str, Any]) -> dict[str, str]:
    """What the header says beside its entries for tensors, and of them."""
    of_key = {name: str(value) for name, value in asdict(key).items()}
    return {**of_key, "entries": _digest(json.dumps(entries))}


def _write(file: BinaryIO, key: WeightsKey, tensors: Mapping[str, Tensor]) -> None:
    # Wider elements first, so that all are aligned to their own size.
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    entries: dict[str, Any] = {}
    end = 0
    for name in names:
        tensor, start = tensors[name], end
        end += tensor.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps({"__metadata__": _metadata(key, entries), **entries}).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(tensors[name].view(torch.uint8).numpy().data)


def _read_header(file: BinaryIO, key: WeightsKey) -> dict[str, _Place]:
    """Places of all tensors. Raises ValueError or the like if this is no whole file of `key`."""
    size = os.fstat(file.fileno()).st_size
    data_start = 8 + int.from_bytes(file.read(8), "little")
    if data_start > size:
        raise ValueError("cut short")
    entries = json.loads(file.read(data_start - 8))
    metadata = entries["__metadata__"]
    del entries["__metadata__"]
    if metadata != _metadata(key, entries):
        raise ValueError("made for another key, or damaged")
    places = {}
    for name, entry in entries.items():
        start = data_start + entry["data_offsets"][0]
        places[name] = _Place(_DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    if max(place.end for place in places.values()) != size:
        raise ValueError("cut short")
    return places


def _read_vectors(file: BinaryIO, places: Mapping[str, _Place]) -> dict[str, Tensor]:
    """Norms and biases: copied, as they are small and often outlive the matrices beside them."""
    vectors = {}
    for name, place in places.items():
        if len(place.shape) == 1:
            file.seek(place.start)
            vectors[name] = place.tensor(bytearray(file.read(place.num_bytes)), place.start)
    return vectors


def _map_matrices(file: BinaryIO, places: Mapping[str, _Place]) -> dict[str, Tensor]:
    groups: dict[str, dict[str, _Place]] = {}
    for name, place in places.items():
        if len(place.shape) > 1:
            groups.setdefault(name.rpartition(".")[0] or name, {})[name] = place
    matrices: dict[str, Tensor] = {}
    for group in groups.values():
        start = min(place.start for place in group.values())
        start -= start % mmap.ALLOCATIONGRANULARITY
        length = max(place.end for place in group.values()) - start
        # Held by the tensors alone, as is its file descriptor: it ends with the last of them.
        mapping = mmap.mmap(file.fileno(), length, access=mmap.ACCESS_COPY, offset=start)
        matrices |= {name: place.tensor(mapping, start) for name, place in group.items()}
    return matrices
