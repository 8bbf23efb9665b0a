"""Memory on huge pages, for tensors that are streamed through: weights and the KV cache.

Each page walk of a virtual machine costs dozens of loads; with pages of 4 KiB a decode step spends
a quarter of its time on them (docs/log.md). Where the system has no huge pages to give, the memory
is ordinary.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_HUGE_PAGE = 2 << 20
_ALIGNMENT = 64


class Arena:
    """Zeroed memory, given out piece by piece; it lives as long as any tensor on it."""

    def __init__(self, num_bytes: int) -> None:
        memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):  # a kernel, or a Python, without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._used = -self._memory.data_ptr() % _HUGE_PAGE

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of zeros. Raises ValueError if the arena is used up."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        start = self._used
        if start + num_bytes > len(self._memory):
            raise ValueError(f"{num_bytes} bytes: {len(self._memory) - start} are left")
        self._used = start + aligned(num_bytes)
        return self._memory[start : start + num_bytes].view(dtype).view(*shape)


def aligned(num_bytes: int) -> int:
    """What a tensor of so many bytes takes up in an arena."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
