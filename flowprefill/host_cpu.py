"""Which processor this is, as Linux tells it."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def cpu_model(path: Path = _CPUINFO) -> str:
    """The model's name, or at least that of the instruction set."""
    return _first(path, "model name") or platform.processor() or platform.machine()


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Names of the instruction set extensions; empty where they are not told."""
    return frozenset(_first(path, "flags").split())


def _first(path: Path, key: str) -> str:
    """The first value of a key, or nothing."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return ""
