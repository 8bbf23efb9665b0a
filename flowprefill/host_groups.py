"""Control groups of this process, of either version, where Linux mounts them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def control_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Version and directory of each group that limits this process, then those of its parents.

    root: where /proc and /sys are; controller: "cpu" or "memory"
    """
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, name = (1, controller) if controllers else (2, "")
        mount = root / "sys/fs/cgroup" / name
        group = mount / path.strip("/")
        while group.is_relative_to(mount):  # a container may see only a part of the path
            yield version, group
            group = group.parent


def read_text(path: Path) -> str:
    """Of a file of /proc or /sys; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
