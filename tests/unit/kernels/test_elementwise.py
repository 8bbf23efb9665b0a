"""RMSNorm, activation and rope against torch's operators, and the bits of each row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.triton_kernels import DEVICE  # first: it skips where triton is not installed

# isort: split

from flowprefill.kernels.activation import silu_and_mul
from flowprefill.kernels.rmsnorm import add_rmsnorm, rmsnorm
from flowprefill.kernels.rope import HeadNorms, rope_and_write
from flowprefill.ops import mlp as torch_mlp
from flowprefill.ops import rmsnorm as torch_rmsnorm
from flowprefill.ops.rope import RotaryTable

EPS = 1e-5
TOLERANCE = {"atol": 2e-6, "rtol": 2e-6}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class TestRMSNorm:
    @pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 50), (2, 4100)])
    def test_it_equals_torch_s(self, rows: int, hidden: int) -> None:
        x, weight = random(rows, hidden), random(hidden, seed=1)
        expected = torch_rmsnorm.rmsnorm(x, weight, EPS)
        torch.testing.assert_close(rmsnorm(x, weight, EPS), expected, **TOLERANCE)

    @pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (5, 50)])
    def test_the_residual_is_added_in_place_first(self, rows: int, hidden: int) -> None:
        x, delta, weight = random(rows, hidden), random(rows, hidden, seed=2), random(hidden)
        residual = x + delta
        normed = add_rmsnorm(x, delta, weight, EPS)
        assert torch.equal(x, residual)
        assert torch.equal(normed, rmsnorm(residual, weight, EPS))

    def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(self) -> None:
        x, weight = random(6, 50), random(50, seed=1)
        parts = [rmsnorm(part, weight, EPS) for part in x.split([1, 3, 2])]
        assert torch.equal(torch.cat(parts), rmsnorm(x, weight, EPS))


class TestSiluAndMul:
    @pytest.mark.parametrize(("rows", "intermediate"), [(1, 1024), (3, 1030), (2, 24)])
    def test_it_equals_torch_s(self, rows: int, intermediate: int) -> None:
        gate_up = 4 * random(rows, 2 * intermediate)
        expected = torch_mlp.silu_and_mul(gate_up.clone())
        torch.testing.assert_close(silu_and_mul(gate_up), expected, **TOLERANCE)


class TestRope:
    """Rows at scattered positions into scattered slots of a small cache."""

    positions = torch.tensor([0, 5, 17, 39, 2], device=DEVICE)
    slots = torch.tensor([3, 11, 2, 23, 8], device=DEVICE)

    def run(
        self, shape: tuple[int, int, int], has_norm: bool, rows: slice = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, and K and V of all slots; NaN where nothing was written."""
        heads, kv_heads, head_dim = shape
        table, qkv, norms = self.inputs(shape, has_norm)
        positions, slots = self.positions[rows], self.slots[rows]
        q = torch.empty(len(slots), heads * head_dim, device=DEVICE)
        k, v = torch.full((2, 3, 8, kv_heads, head_dim), torch.nan, device=DEVICE)
        cos, sin = table.cos, table.sin
        rope_and_write(qkv[rows], positions, slots, cos, sin, 0.7, norms, q, k, v)
        return q, k.flatten(0, 1), v.flatten(0, 1)

    def inputs(
        self, shape: tuple[int, int, int], has_norm: bool
    ) -> tuple[RotaryTable, Tensor, HeadNorms | None]:
        heads, kv_heads, head_dim = shape
        frequencies = 1.0 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
        table = RotaryTable(frequencies, 40, DEVICE)
        qkv = random(len(self.slots), (heads + 2 * kv_heads) * head_dim)
        norms = HeadNorms(random(head_dim, seed=1), random(head_dim, seed=2), EPS)
        return table, qkv, norms if has_norm else None

    @pytest.mark.parametrize("has_norm", [False, True])
    @pytest.mark.parametrize("shape", [(4, 2, 16), (9, 3, 64), (10, 1, 96)])
    def test_q_and_the_cache_equal_torch_s(
        self, shape: tuple[int, int, int], has_norm: bool
    ) -> None:
        heads, kv_heads, head_dim = shape
        q, k, v = self.run(shape, has_norm)
        table, qkv, norms = self.inputs(shape, has_norm)
        parts = qkv.view(len(qkv), -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
        normed = list(parts)
        if norms:
            normed[0] = torch_rmsnorm.rmsnorm(parts[0], norms.q, EPS)
            normed[1] = torch_rmsnorm.rmsnorm(parts[1], norms.k, EPS)
        expected = 0.7 * table.apply(normed[0], self.positions)
        torch.testing.assert_close(q, expected.flatten(1), **TOLERANCE)
        expected = table.apply(normed[1], self.positions)
        torch.testing.assert_close(k[self.slots], expected, **TOLERANCE)
        assert torch.equal(v[self.slots], parts[2])
        others = [i for i in range(len(k)) if i not in self.slots]
        assert k[others].isnan().all() and v[others].isnan().all()

    def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(self) -> None:
        together = self.run((4, 2, 16), True)
        for row in (0, 3):
            alone = self.run((4, 2, 16), True, slice(row, row + 1))
            assert torch.equal(alone[0][0], together[0][row])
            slot = self.slots[row]
            assert torch.equal(alone[1][slot], together[1][slot])
