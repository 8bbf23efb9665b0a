from __future__ import annotations

from tests.triton_kernels import quick_interpreter, row_by_row

__all__ = ["quick_interpreter", "row_by_row"]
