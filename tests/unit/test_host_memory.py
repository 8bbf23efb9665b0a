from __future__ import annotations

from pathlib import Path

import pytest

from flowprefill.host_memory import available_bytes

MEMINFO = "MemTotal:       2000 kB\nMemFree:         500 kB\nMemAvailable:   1000 kB\n"
V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def group_v1(path: str, limit: int, usage: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{V1}/{path}/memory.limit_in_bytes": f"{limit}\n",
        f"{V1}/{path}/memory.usage_in_bytes": f"{usage}\n",
        f"{V1}/{path}/memory.stat": f"inactive_file 7\ntotal_inactive_file {cached}\n",
    }


def group_v2(path: str, limit: int | str, usage: int, cached: int = 0) -> dict[str, str]:
    return {
        f"{V2}/{path}/memory.max": f"{limit}\n",
        f"{V2}/{path}/memory.current": f"{usage}\n",
        f"{V2}/{path}/memory.stat": f"anon 9\ninactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, 1_024_000),
        ("0::/\n", {}, 1_024_000),
        ("0::/a/b\n", group_v2("a/b", 1000, 700, cached=50), 350),
        ("0::/a/b\n", {**group_v2("a/b", "max", 700), **group_v2("a", 900, 800)}, 100),
        ("0::/a\n", group_v2("a", 2**62, 700), 1_024_000),
        ("0::/\n", group_v2("", 1000, 700), 300),  # inside a container
        ("0::/../x\n", group_v2("", 1000, 700), 300),  # of another namespace
        ("0::/a\n", group_v2("a", 1000, 1200), 0),
        ("4:cpu,memory:/a\n1:cpu:/b\n0::/\n", group_v1("a", 1000, 700, cached=50), 350),
        ("4:memory:/outside\n", group_v1("", 1000, 700), 300),
        ("1:cpu:/a\n", group_v1("a", 1000, 700), 1_024_000),
    ],
)
def test_what_is_available_is_the_least_that_any_limit_leaves(
    tmp_path: Path, groups: str, files: dict[str, str], expected: int
) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files})
    assert available_bytes(tmp_path) == expected


def test_a_system_that_tells_nothing_is_not_guessed_at(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemTotal: 2000 kB\n"})
    assert available_bytes(tmp_path) is None


def test_this_machine_has_some_memory() -> None:
    assert (available_bytes() or 0) > 2**20
