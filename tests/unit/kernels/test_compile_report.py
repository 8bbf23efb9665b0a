"""Ahead-of-time compilation for A100, H100 and B200: registers, spills, shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="no Triton kernels: the package triton is not installed")

MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
"""Of one block; CUDA C++ Programming Guide, table of technical specifications."""
FEW_BYTES = 64
"""That may be spilled where it is not forbidden: a few values, outside the loops."""
KERNELS = {"rmsnorm", "add_rmsnorm", "silu_and_mul", "choose"}
KERNELS_OF_HEAD_DIM = {"rope", "prefill attention", "long prefill attention", "decode attention"}
KERNELS_OF_HEAD_DIM |= {"norm and rope", "combine"}


def report(target: str, head_dim: int) -> list[dict[str, Any]]:
    """In a process of its own: in this one kernels are interpreted."""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "flowprefill.kernels.compile_report", target]
    ran = subprocess.run(
        [*command, "--head-dims", str(head_dim)], env=environ, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def check(target: str, head_dim: int, most_spilled: int) -> None:
    found = report(target, head_dim)
    expected = KERNELS | {f"{name} d{head_dim}" for name in KERNELS_OF_HEAD_DIM}
    assert {kernel["name"] for kernel in found} == expected
    for kernel in found:
        assert kernel["spilled_bytes"] <= most_spilled, kernel
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES[target], kernel


@pytest.mark.parametrize("target", MAX_SHARED_BYTES)
def test_nothing_is_spilled_at_head_dim_128(target: str) -> None:
    check(target, 128, most_spilled=0)


@pytest.mark.slow
@pytest.mark.parametrize("target", MAX_SHARED_BYTES)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_little_is_spilled_at_other_head_dims(target: str, head_dim: int) -> None:
    check(target, head_dim, FEW_BYTES)
