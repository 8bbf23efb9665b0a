"""Linear against torch's own product, and the bits of each row."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from flowprefill.ops.linear import Linear

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = [(64, 64), (96, 192), (576, 960), (576, 1536), (1536, 576), (100, 30), (128, 1)]
"""(in_features, out_features)"""
NUM_ROWS = [*range(1, 41), 64, 100, 513]
TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2},
}


def make_linear(
    shape: tuple[int, int], dtype: torch.dtype, has_bias: bool
) -> tuple[Linear, torch.Tensor, torch.Tensor | None]:
    """The operator, and the weight and bias it was made of."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape[1], shape[0], generator=generator) / shape[0] ** 0.5).to(dtype)
    bias = torch.randn(shape[1], generator=generator).to(dtype) if has_bias else None
    return Linear(weight, bias), weight, bias


def make_rows(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_equals_torchs_product(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    linear, weight, bias = make_linear(shape, dtype, has_bias)
    for num_rows in (1, 2, 17, 100):
        x = make_rows(num_rows, shape[0], dtype)
        expected = functional.linear(
            x.double(), weight.double(), None if bias is None else bias.double()
        )
        y = linear(x)
        assert y.shape == (num_rows, shape[1]) and y.dtype == dtype
        torch.testing.assert_close(y.double(), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(
    shape: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    linear, _, _ = make_linear(shape, dtype, has_bias)
    x = make_rows(max(NUM_ROWS), shape[0], dtype)
    together = linear(x)
    for num_rows in NUM_ROWS:
        for first in {0, max(NUM_ROWS) - num_rows}:
            part = linear(x[first : first + num_rows])
            assert torch.equal(part, together[first : first + num_rows]), f"{num_rows} rows"


def test_sizes_are_those_of_the_weight() -> None:
    linear, _, _ = make_linear((100, 30), torch.float32, has_bias=False)
    assert (linear.in_features, linear.out_features) == (100, 30)
