"""Tests that run the Triton kernels: on a CUDA device, else in triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="no Triton kernels: the package triton is not installed")

from triton.runtime import interpreter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product whose rows do not see each other, as a GPU's. The interpreter's is BLAS's, which
    computes the last rows of a tile otherwise than the first."""

    def create_dot(self: Any, a: Any, b: Any, d: Any, *args: Any) -> Any:
        product = interpreter.np.einsum("ik,kn->in", a.data, b.data, optimize=False)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def quick_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a check for overflow of each integer, which takes a third of the time."""
    builder = interpreter.interpreter_builder
    options = dataclasses.replace(builder.options, sanitize_overflow=False)
    monkeypatch.setattr(builder, "options", options)
