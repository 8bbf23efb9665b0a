from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flowprefill.executor.device import CpuDevice
from flowprefill.host_cpu import num_cpus

V1 = "sys/fs/cgroup/cpu"
V2 = "sys/fs/cgroup"
MANY = 64
"""Processors of the affinity."""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def group_v1(path: str, quota: int, period: int = 100_000) -> dict[str, str]:
    return {
        f"{V1}/{path}/cpu.cfs_quota_us": f"{quota}\n",
        f"{V1}/{path}/cpu.cfs_period_us": f"{period}\n",
    }


def group_v2(path: str, quota: int | str, period: int = 100_000) -> dict[str, str]:
    return {f"{V2}/{path}/cpu.max": f"{quota} {period}\n"}


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("", {}, MANY),
        ("0::/\n", {}, MANY),
        ("0::/\n", group_v2("", 400_000), 4),  # inside a container: docker run --cpus 4
        ("0::/a/b\n", group_v2("a/b", "max"), MANY),
        ("0::/a/b\n", {**group_v2("a/b", "max"), **group_v2("a", 200_000)}, 2),
        ("0::/a\n", group_v2("a", 150_000), 2),
        ("0::/a\n", group_v2("a", 10_000), 1),
        ("0::/a\n", group_v2("a", 20_000, period=10_000), 2),
        ("0::/a\n", group_v2("a", 100 * 100_000), MANY),
        ("0::/../x\n", group_v2("", 300_000), 3),  # of another namespace
        ("4:cpu,cpuacct:/a\n1:memory:/b\n0::/\n", group_v1("a", 250_000), 3),
        ("4:cpu:/outside\n", group_v1("", 200_000), 2),
        ("4:cpu:/a\n", group_v1("a", -1), MANY),
        ("1:cpuacct:/a\n", group_v1("a", 200_000), MANY),
        ("0::/a\n", {f"{V2}/a/cpu.max": "?\n"}, MANY),
    ],
)
def test_processors_are_the_least_that_affinity_and_any_quota_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MANY)))
    write(tmp_path, {"proc/self/cgroup": groups, **files})
    assert num_cpus(tmp_path) == expected


def test_a_cpu_device_takes_so_many_threads_unless_told() -> None:
    num_threads = torch.get_num_threads()
    try:
        assert CpuDevice(1).num_threads == 1
        assert CpuDevice(None).num_threads == num_cpus() <= len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(num_threads)
