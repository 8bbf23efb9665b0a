"""StopWord: how far a pass may run, in memory that all ranks share. Knows no passes.

Rank 0 publishes (run id, boundary) before it runs towards that boundary; a follower looks at each
boundary. One aligned store and one load of 64 bits, so a reader sees a word that was published,
whole. The memory has no name: nothing stays when the processes end, however they end.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import NamedTuple

_BYTES = mmap.PAGESIZE
_BOUNDARY_BITS = 24
MAX_BOUNDARY = (1 << _BOUNDARY_BITS) - 1


class StopAt(NamedTuple):
    """Where a run must be left, unless a further boundary is published first."""

    run_id: int
    """Runs count from 1, each a stretch of a pass; 0 = none yet."""
    boundary: int
    """Boundaries count from 0, the one at which the run begins."""


class StopWord:
    """One writer, many readers."""

    def __init__(self, fd: int) -> None:
        """fd: of the memory; taken over."""
        self.fd = fd
        self._memory = mmap.mmap(fd, _BYTES)
        self._word = ctypes.c_uint64.from_buffer(self._memory)

    @staticmethod
    def create() -> StopWord:
        """A new one; another process opens it by the descriptor that it inherits."""
        fd = os.memfd_create("flowprefill-stop-word", os.MFD_CLOEXEC)
        os.ftruncate(fd, _BYTES)
        return StopWord(fd)

    def publish(self, run_id: int, boundary: int) -> None:
        assert boundary <= MAX_BOUNDARY
        self._word.value = run_id << _BOUNDARY_BITS | boundary

    def read(self) -> StopAt:
        word = self._word.value
        return StopAt(word >> _BOUNDARY_BITS, word & MAX_BOUNDARY)

    def close(self) -> None:
        """Neither read nor published afterwards."""
        del self._word  # the memory cannot be unmapped while it is referred to
        self._memory.close()
        os.close(self.fd)
