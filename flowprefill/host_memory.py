"""Memory that this process can still get, as Linux tells it: its control groups, then the host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class _Names:
    """Files of a memory control group, each holding bytes."""

    mount: str
    limit: str
    usage: str
    inactive_file: str
    """Line of memory.stat: cached file pages, which the kernel gives up first."""


_V1 = _Names(
    "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
)
_V2 = _Names("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


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
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        names = _V1 if controllers else _V2
        mount = root / names.mount
        group = mount / path.strip("/")
        while group.is_relative_to(mount):  # a container may see only a part of the path
            limit, usage = _value(group / names.limit), _value(group / names.usage)
            if limit is not None and usage is not None:
                yield limit - usage + (_value(group / "memory.stat", names.inactive_file) or 0)
            group = group.parent


def _value(path: Path, name: str = "") -> int | None:
    """The number behind `name` at the start of a line; None if there is none, such as for "max"."""
    found = re.search(rf"^{name}\s*(\d+)", _read(path), re.MULTILINE)
    return int(found[1]) if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
