"""Operators as Triton kernels. The only files that import triton; loaded only where they are used.

Each row's arithmetic is independent of the rows beside it, as in ops/: a program's tiles are
constants, keys are cut at fixed absolute edges, and sums are fp32 in one order.
"""

from __future__ import annotations

import os

from flowprefill.errors import FlowPrefillError
from flowprefill.user_cache import user_cache_directory


class TritonUnavailableError(FlowPrefillError):
    """The Triton kernels do not run a model here; says why."""


def keep_compiled_kernels() -> None:
    """Beside the other caches, unless the environment says otherwise; call it before the first
    kernel is compiled. triton's own place, ~/.triton, is in a container often not there or gone
    with it."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(user_cache_directory("triton")))
