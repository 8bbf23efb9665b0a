"""GGUF container: metadata and tensors of one file, dequantised on demand. No torch.

Reads the header itself because gguf.GGUFReader spends seconds building one array per vocabulary
entry; block formats are left to gguf.quants. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
from numpy.typing import NDArray

from flowprefill.errors import ModelLoadError

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_MAX_DIMS = 4


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies in the file."""

    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts (GGUF itself counts the other way)."""
    quant_type: Any
    """gguf.GGMLQuantizationType of the stored blocks."""
    offset: int
    """First byte, from the start of the file."""
    row_bytes: int
    """Bytes of one row of shape[-1] elements; rows are quantised independently."""


class GgufFile:
    """One GGUF file: `metadata` (scalars, strings, lists) and `tensors` by name.

    Raises ModelLoadError if the file is not GGUF version 2 or 3 (little endian), or is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._bytes = np.memmap(path, mode="r", dtype=np.uint8)
            header = _HeaderReader(self._bytes.data)
            self.metadata, self.tensors = header.read()
        except (OSError, ValueError, struct.error) as error:
            raise ModelLoadError(f"{path}: not a readable GGUF file: {error}") from error

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Dequantise rows start..stop of a tensor: [stop - start, shape[-1]] fp32.

        A one-dimensional tensor is one row. Raises ModelLoadError for block formats that the gguf
        package cannot dequantise.
        """
        tensor = self.tensors[name]
        first = tensor.offset + start * tensor.row_bytes
        stored = self._bytes[first : first + (stop - start) * tensor.row_bytes]
        rows = stored.reshape(stop - start, tensor.row_bytes)
        try:
            values: NDArray[np.float32] = gguf.quants.dequantize(rows, tensor.quant_type)
        except NotImplementedError as error:
            raise ModelLoadError(
                f"{self.path}: tensor {name}: cannot dequantise {tensor.quant_type.name}"
            ) from error
        # fp32 tensors come back as a view of the read-only file.
        return values if values.flags.writeable else values.copy()


class _HeaderReader:
    """A cursor over the header. Raises ValueError or struct.error on malformed input."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._offset = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if bytes(self._view[:4]) != b"GGUF":
            raise ValueError("it does not start with GGUF")
        self._offset = 4
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; known: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("<I"))
        placed = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0:
            raise ValueError(f"general.alignment={alignment!r}")
        data_start = -(-self._offset // alignment) * alignment
        return metadata, dict(self._place(info, data_start) for info in placed)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("<Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("<I"), self._scalar("<Q")

    def _place(
        self, info: tuple[str, tuple[int, ...], int, int], data_start: int
    ) -> tuple[str, GgufTensor]:
        name, shape, type_id, offset = info
        quant_type = gguf.GGMLQuantizationType(type_id)
        block_size, block_bytes = gguf.GGML_QUANT_SIZES[quant_type]
        if shape[-1] % block_size:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} in blocks of {block_size}")
        row_bytes = shape[-1] // block_size * block_bytes
        end = data_start + offset + math.prod(shape[:-1]) * row_bytes
        if end > len(self._view):
            raise ValueError(f"tensor {name} ends at byte {end} of {len(self._view)}: cut short")
        return name, GgufTensor(shape, quant_type, data_start + offset, row_bytes)

    def _value(self, type_id: int) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id != _ARRAY:
            return self._scalar(self._format(type_id))
        item_type, count = self._scalar("<I"), self._scalar("<Q")
        if item_type == _STRING:
            return [self._string() for _ in range(count)]
        item_format = self._format(item_type)
        size = struct.calcsize(item_format) * count
        items = np.frombuffer(self._take(size), dtype=np.dtype(item_format))
        return items.tolist()

    @staticmethod
    def _format(type_id: int) -> str:
        if type_id not in _SCALARS:
            raise ValueError(f"metadata value of unknown type {type_id}")
        return _SCALARS[type_id]

    def _scalar(self, fmt: str) -> Any:
        (value,) = struct.unpack_from(fmt, self._view, self._offset)
        self._offset += struct.calcsize(fmt)
        return value

    def _string(self) -> str:
        return str(self._take(self._scalar("<Q")), "utf-8")

    def _take(self, size: int) -> memoryview:
        end = self._offset + size
        if end > len(self._view):
            raise ValueError(f"it ends at byte {len(self._view)} inside its header")
        taken = self._view[self._offset : end]
        self._offset = end
        return taken
