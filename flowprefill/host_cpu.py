"""Which processor this is, as Linux tells it."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu_model(path: Path = Path("/proc/cpuinfo")) -> str:
    """The model's name, or at least that of the instruction set."""
    try:
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
