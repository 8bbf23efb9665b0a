"""Which processor this is and how much of it is ours, as Linux tells it."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from flowprefill.host_groups import control_groups, read_text

_CPUINFO = Path("/proc/cpuinfo")


def cpu_model(path: Path = _CPUINFO) -> str:
    """The model's name, or at least that of the instruction set."""
    return _first(path, "model name") or platform.processor() or platform.machine()


def cpu_flags(path: Path = _CPUINFO) -> frozenset[str]:
    """Names of the instruction set extensions; empty where they are not told."""
    return frozenset(_first(path, "flags").split())


def num_cpus(root: Path = Path("/")) -> int:
    """Processors that this process may keep busy: by its affinity and by every group's quota.

    More threads than the quota has processors are all stopped together until its next period.
    root: where /proc and /sys are
    """
    return min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas(root))])


def _quotas(root: Path) -> Iterator[float]:
    """Processors that each control group of this process, and each of its parents, grants."""
    for version, group in control_groups(root, "cpu"):
        if version == 1:
            fields = [read_text(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        else:
            fields = read_text(group / "cpu.max").split()
        try:
            quota, period = map(int, fields)
        except ValueError:  # no such file, or "max"
            continue
        if quota > 0 and period > 0:  # a quota of -1 is none
            yield quota / period


def _first(path: Path, key: str) -> str:
    """The first value of a key, or nothing."""
    for line in read_text(path).splitlines():
        if line.startswith(key):
            return line.partition(":")[2].strip()
    return ""
