"""Tests that run the native CPU kernels, and where they are skipped."""

from __future__ import annotations

import pytest
import torch

from flowprefill.host_cpu import cpu_flags
from flowprefill.native.library import AMX_FLAG, BF16_FLAG, NativeUnavailableError, load_library

KERNELS = ("torch", "native")


def require_native(dtype: str | torch.dtype) -> None:
    """Skip the test where no model of this type runs on the kernels: another processor, or no C++
    compiler."""
    try:
        load_library()
    except NativeUnavailableError as error:
        pytest.skip(f"no native kernels: {error}")
    flags = cpu_flags()
    if dtype in ("bfloat16", torch.bfloat16) and (BF16_FLAG not in flags or AMX_FLAG in flags):
        pytest.skip(f"no native kernels in bfloat16: they need {BF16_FLAG}, and no {AMX_FLAG}")
