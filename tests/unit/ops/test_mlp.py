from __future__ import annotations

import pytest
import torch

from flowprefill.ops.mlp import silu_and_mul

DTYPES = (torch.float32, torch.bfloat16)


def make_gate_up(num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(num_rows, 2 * width, generator=torch.Generator().manual_seed(0)) * 3).to(
        dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 96), (17, 1536), (5, 33)])
def test_gate_is_the_first_half(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gate_up = make_gate_up(*shape, dtype)
    gate, up = gate_up[:, : shape[1]].double(), gate_up[:, shape[1] :].double()
    expected = gate / (1 + (-gate).exp()) * up
    out = silu_and_mul(gate_up)
    assert out.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_input_is_left_as_it_was() -> None:
    gate_up = make_gate_up(3, 96, torch.float32)
    before = gate_up.clone()
    silu_and_mul(gate_up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [96, 100, 1536])
def test_bits_of_a_row_do_not_depend_on_the_number_of_rows(width: int, dtype: torch.dtype) -> None:
    gate_up = make_gate_up(101, width, dtype)
    together = silu_and_mul(gate_up)
    for num_rows in (1, 2, 3, 16, 31):
        parts = [silu_and_mul(part) for part in gate_up.split(num_rows)]
        assert torch.equal(torch.cat(parts), together), f"{num_rows} rows at a time"
