"""Memory that this process can still get, as Linux tells it: its control groups, then the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flowprefill.host_groups import control_groups, read_text


@dataclass(frozen=True)
class _Names:
    """Files of a memory control group, each holding bytes."""

    limit: str
    usage: str
    inactive_file: str
    """Line of memory.stat: cached file pages, which the kernel gives up first."""


_V1 = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Names("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be taken without swapping and within every control group's limit.

    root: where /proc and /sys are. None where the system does not tell.
    """
    free = list(_free_in_groups(root))
    available = _value(root / "proc/meminfo", "MemAvailable:")
    if available is not None:
        free.append(available * 1024)  # told in kB
    return max(0, min(free)) if free else None


def _free_in_groups(root: Path) -> Iterator[int]:
    """What each control group of this process and each of its parents leaves."""
    for version, group in control_groups(root, "memory"):
        names = _V1 if version == 1 else _V2
        limit, usage = _value(group / names.limit), _value(group / names.usage)
        if limit is not None and usage is not None:
            yield limit - usage + (_value(group / "memory.stat", names.inactive_file) or 0)


def _value(path: Path, name: str = "") -> int | None:
    """The number behind `name` at the start of a line; None if there is none, such as for "max"."""
    found = re.search(rf"^{name}\s*(\d+)", read_text(path), re.MULTILINE)
    return int(found[1]) if found else None
