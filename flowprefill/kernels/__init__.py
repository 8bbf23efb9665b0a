"""Operators as Triton kernels. The only files that import triton; loaded only where they are used.

Each row's arithmetic is independent of the rows beside it, as in ops/: a program's tiles are
constants, keys are cut at fixed absolute edges, and sums are fp32 in one order.
"""

from __future__ import annotations

from flowprefill.errors import FlowPrefillError


class TritonUnavailableError(FlowPrefillError):
    """The Triton kernels do not run a model here; says why."""
