from __future__ import annotations

import pytest
import torch

from flowprefill.ops.rmsnorm import rmsnorm

DTYPES = (torch.float32, torch.bfloat16)


def make_input(
    *shape: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and a weight for its last dimension."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator).to(dtype)
    return x, torch.randn(shape[-1], generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 576), (3, 5, 16)])
def test_rmsnorm_equals_its_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = make_input(*shape, dtype=dtype)
    y = rmsnorm(x, weight, 1e-5)
    exact = x.double()
    exact = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    assert y.dtype == dtype and y.shape == x.shape
    torch.testing.assert_close(y, exact.to(dtype))


def test_epsilon_keeps_a_row_of_zeros_at_zero() -> None:
    _, weight = make_input(2, 64)
    assert torch.equal(rmsnorm(torch.zeros(2, 64), weight, 1e-6), torch.zeros(2, 64))


def test_small_bf16_rows_are_normalised_in_fp32() -> None:
    x = torch.full((1, 64), 1e-25, dtype=torch.bfloat16)  # its square is below fp32's range
    y = rmsnorm(x, torch.ones(64), 1e-30)
    torch.testing.assert_close(y.float(), torch.full((1, 64), 1e-10), rtol=1e-2, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [16, 50, 576, 1000])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(hidden: int, dtype: torch.dtype) -> None:
    x, weight = make_input(300, hidden, dtype=dtype)
    together = rmsnorm(x, weight, 1e-5)
    for num_rows in (1, 2, 3, 16, 31, 100):
        parts = [rmsnorm(part, weight, 1e-5) for part in x.split(num_rows)]
        assert torch.equal(torch.cat(parts), together), f"{num_rows} rows at a time"
