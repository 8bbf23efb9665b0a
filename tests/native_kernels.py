"""Tests that run the native CPU kernels, and where they are skipped."""

from __future__ import annotations

import pytest
import torch

from flowprefill.host_cpu import cpu_flags
from flowprefill.native.library import BF16_FLAG, NativeUnavailableError, load_library

KERNELS = ("torch", "native")


def require_native(dtype: str | torch.dtype) -> None:
    """Skip the test where the kernels cannot run: another processor, or no C++ compiler."""
    try:
        load_library()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    if dtype in ("bfloat16", torch.bfloat16) and BF16_FLAG not in cpu_flags():
        pytest.skip(f"no native kernels in bfloat16: this processor has no {BF16_FLAG}")
