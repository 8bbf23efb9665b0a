"""Checks of the Triton kernels against torch, in fp32, on the same device and the same inputs.

Aligned and odd shapes, every head_dim that models have. In triton's interpreter the shapes are
smaller, and there is no bf16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flowprefill.bench.gpu.checks import Check, NotChecked
from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache
from flowprefill.ops import attention as torch_attention
from flowprefill.ops import mlp as torch_mlp
from flowprefill.ops import rmsnorm as torch_rmsnorm
from flowprefill.ops.rope import RotaryTable

if TYPE_CHECKING:
    from flowprefill.kernels.attention import Tiling

HEAD_DIMS = (64, 96, 128, 256)
TOLERANCE = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (1e-2, 1.6e-2)}
"""Absolute and relative."""
_EPS = 1e-5
_BLOCK_SIZE = 16
_HEADS, _KV_HEADS = 6, 2
_SCALE = 0.7


@dataclass(frozen=True)
class Shapes:
    """What is run; the first of each pair is aligned, the second odd."""

    norms: tuple[tuple[int, int], ...]
    """(rows, hidden)."""
    activations: tuple[tuple[int, int], ...]
    """(rows, intermediate)."""
    rope_rows: tuple[int, ...]
    attention: tuple[tuple[tuple[int, int], ...], ...]
    """Of each sequence: position of its first query row, and how many rows."""
    decode: tuple[tuple[int, ...], ...]
    """Cached tokens of each sequence."""
    split: int | None
    """Keys of a split; None = the kernel's own."""
    logits: tuple[tuple[int, int], ...]
    """(rows, vocab)."""


CARD = Shapes(
    norms=((64, 4096), (1, 50), (77, 5120), (3, 4100)),
    activations=((64, 14_336), (3, 1030)),
    rope_rows=(64, 13),
    attention=(((0, 256),), ((1030, 77), (511, 5), (0, 1), (8200, 33))),
    decode=((511,), (2049, 0, 1023, 77)),
    split=None,
    logits=((64, 128_256), (3, 50_001)),
)
INTERPRETER = Shapes(
    norms=((4, 64), (3, 50)),
    activations=((2, 64), (3, 70)),
    rope_rows=(2, 3),
    attention=(((0, 16),), ((40, 5), (0, 3))),
    decode=((63,), (70, 0)),
    split=64,
    logits=((2, 64), (3, 8200)),
)


def kernel_checks(device: torch.device) -> list[Check]:
    """All of them. On a CPU in triton's interpreter, if triton is there."""
    is_card = device.type == "cuda"
    shapes = CARD if is_card else INTERPRETER
    dtypes = (torch.bfloat16, torch.float32) if is_card else (torch.float32,)
    logits = Inputs(device, torch.float32)
    checks = [
        Check(f"choice of tokens {shape}", partial(_described, partial(choice, logits, shape)))
        for shape in shapes.logits
    ]
    for dtype in dtypes:
        inputs = Inputs(device, dtype)
        name = str(dtype).removeprefix("torch.")
        claims: list[tuple[str, Callable[[], float]]] = []
        claims += [(f"rmsnorm {shape}", partial(norm, inputs, shape)) for shape in shapes.norms]
        claims += [
            (f"silu and mul {shape}", partial(activation, inputs, shape))
            for shape in shapes.activations
        ]
        for head_dim in HEAD_DIMS:
            claims += [
                (f"{what}, head_dim {head_dim}", partial(claim, inputs, head_dim, shapes))
                for what, claim in _BY_HEAD_DIM.items()
            ]
        checks += [Check(f"{what}, {name}", partial(_described, run)) for what, run in claims]
    return checks


def _described(run: Callable[[], float]) -> str:
    if importlib.util.find_spec("triton") is None and not torch.cuda.is_available():
        raise NotChecked("the package triton is not installed")
    return f"largest difference {run():.1e}"


class Inputs:
    """Random tensors, the same in each run."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = torch.Generator(device).manual_seed(0)

    def draw(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal; in the dtype that is checked, or another."""
        drawn = torch.randn(shape, generator=self._generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def difference(self, ours: Tensor, theirs: Tensor) -> float:
        """The largest one. Raises AssertionError if it is beyond TOLERANCE."""
        atol, rtol = TOLERANCE[self.dtype]
        torch.testing.assert_close(ours.float(), theirs.float(), atol=atol, rtol=rtol)
        return float((ours.float() - theirs.float()).abs().max())


def norm(inputs: Inputs, shape: tuple[int, int]) -> float:
    """With and without a residual, which is added in place."""
    from flowprefill.kernels.rmsnorm import add_rmsnorm, rmsnorm

    x, delta = inputs.draw(*shape), inputs.draw(*shape)
    weight = inputs.draw(shape[1], dtype=torch.float32)
    expected = torch_rmsnorm.rmsnorm(x.float(), weight, _EPS)
    first = inputs.difference(rmsnorm(x, weight, _EPS), expected)
    residual = x + delta
    ours = add_rmsnorm(x, delta, weight, _EPS)
    assert torch.equal(x, residual), "the residual is not the rounded sum"
    expected = torch_rmsnorm.rmsnorm(residual.float(), weight, _EPS)
    return max(first, inputs.difference(ours, expected))


def activation(inputs: Inputs, shape: tuple[int, int]) -> float:
    """silu(gate) * up."""
    from flowprefill.kernels.activation import silu_and_mul

    gate_up = inputs.draw(shape[0], 2 * shape[1])
    return inputs.difference(silu_and_mul(gate_up), torch_mlp.silu_and_mul(gate_up.float()))


def choice(inputs: Inputs, shape: tuple[int, int]) -> float:
    """The most likely tokens: greedy, and drawn where only one is left."""
    from flowprefill.executor.device_choice import Draw, choose_by_kernel

    logits = inputs.draw(*shape)
    draws = [Draw(0.0), Draw(1.0, top_k=1, uniform=0.5), Draw(0.7, top_p=1e-6, uniform=0.9)]
    chosen = choose_by_kernel(logits, [draws[row % len(draws)] for row in range(shape[0])])
    assert all(one.is_finite for one in chosen), "finite logits are called not finite"
    tokens = torch.tensor([one.token_id for one in chosen], device=inputs.device)
    assert torch.equal(tokens, logits.argmax(-1)), "not the most likely token"
    logprobs = torch.tensor([one.logprob for one in chosen], device=inputs.device)
    return inputs.difference(logprobs, logits.log_softmax(-1).amax(-1))


def rope(inputs: Inputs, head_dim: int, shapes: Shapes) -> float:
    """Queries and what is in the cache, with and without the heads' norms."""
    largest = 0.0
    for num_rows in shapes.rope_rows:
        for has_norm in (False, True):
            largest = max(largest, _rope(inputs, head_dim, num_rows, has_norm))
    return largest


def _rope(inputs: Inputs, head_dim: int, num_rows: int, has_norm: bool) -> float:
    from flowprefill.kernels.rope import HeadNorms, rope_and_write

    device, dtype, num_slots = inputs.device, inputs.dtype, 2 * num_rows + _BLOCK_SIZE
    exponents = torch.arange(0, head_dim, 2) / head_dim
    table = RotaryTable(1.0 / 10_000**exponents, 4096, device)
    qkv = inputs.draw(num_rows, (_HEADS + 2 * _KV_HEADS) * head_dim)
    q_norm, k_norm = inputs.draw(2, head_dim, dtype=torch.float32)
    norms = HeadNorms(q_norm, k_norm, _EPS) if has_norm else None
    positions = torch.arange(num_rows, device=device) * 7 % 4096
    slots = torch.arange(num_rows, device=device) * 2 + 1
    q = torch.empty(num_rows, _HEADS * head_dim, dtype=dtype, device=device)
    blocks = -(-num_slots // _BLOCK_SIZE)
    k, v = inputs.draw(2, blocks, _BLOCK_SIZE, _KV_HEADS, head_dim)
    untouched = k.clone()
    rope_and_write(qkv, positions, slots, table.cos, table.sin, _SCALE, norms, q, k, v)
    parts = qkv.view(num_rows, -1, head_dim).split([_HEADS, _KV_HEADS, _KV_HEADS], dim=1)
    heads, keys, values = parts
    if norms:
        heads = torch_rmsnorm.rmsnorm(heads, norms.q, _EPS)
        keys = torch_rmsnorm.rmsnorm(keys, norms.k, _EPS)
    expected = _SCALE * table.apply(heads.float(), positions)
    first = inputs.difference(q, expected.flatten(1))
    k, v = k.flatten(0, 1), v.flatten(0, 1)
    assert torch.equal(v[slots], values), "V in the cache is not V"
    others = torch.ones(len(k), dtype=torch.bool, device=device)
    others[slots] = False
    assert torch.equal(k[others], untouched.flatten(0, 1)[others]), "other slots were written"
    return max(first, inputs.difference(k[slots], table.apply(keys.float(), positions)))


def prefill(inputs: Inputs, head_dim: int, shapes: Shapes) -> float:
    """Several rows of each sequence, on scattered blocks."""
    from flowprefill.kernels.attention import prefill_tiling

    tiling = prefill_tiling(head_dim, inputs.dtype)
    cases = shapes.attention
    return max(_attention(inputs, head_dim, case, tiling, shapes.split) for case in cases)


def decode(inputs: Inputs, head_dim: int, shapes: Shapes) -> float:
    """One row of each sequence."""
    from flowprefill.kernels.attention import decode_tiling

    tiling = decode_tiling(head_dim, inputs.dtype)
    cases = [[(context, 1) for context in contexts] for contexts in shapes.decode]
    return max(_attention(inputs, head_dim, case, tiling, shapes.split) for case in cases)


def _attention(
    inputs: Inputs,
    head_dim: int,
    sequences: Sequence[tuple[int, int]],
    tiling: Tiling,
    split: int | None,
) -> float:
    """sequences: (first position, rows) of each"""
    from flowprefill.kernels.attention import paged_attention

    tiling = replace(tiling, split=split) if split else tiling
    cache, tables = _filled_cache(inputs, head_dim, [first + rows for first, rows in sequences])
    num_rows = [rows for _, rows in sequences]
    ends = torch.tensor(num_rows).cumsum(0).tolist()
    starts = [end - rows for end, rows in zip(ends, num_rows, strict=True)]
    q = inputs.draw(ends[-1], _HEADS, head_dim) * torch_attention.query_scale(head_dim)
    described = [
        [table.ids.data_ptr(), first, start, end]
        for table, (first, _), start, end in zip(tables, sequences, starts, ends, strict=True)
    ]
    where = torch.tensor(described, device=inputs.device)
    num_keys = max(first + rows for first, rows in sequences)
    ours = q.clone()
    paged_attention(ours, cache.k[0], cache.v[0], where, max(num_rows), num_keys, tiling)
    largest = 0.0
    for table, (first, _), start, end in zip(tables, sequences, starts, ends, strict=True):
        k, v = cache.k[0].float(), cache.v[0].float()
        rows = q[start:end].float().unsqueeze(0)
        theirs = torch_attention.paged_attention(rows, k, v, [table], [first])[0]
        largest = max(largest, inputs.difference(ours[start:end], theirs))
    return largest


def _filled_cache(
    inputs: Inputs, head_dim: int, lengths: Sequence[int]
) -> tuple[KVCache, list[BlockTable]]:
    """Sequences on every other block; unused slots hold what would show."""
    counts = [-(-length // _BLOCK_SIZE) for length in lengths]
    cache = KVCache(
        2 * sum(counts),
        _BLOCK_SIZE,
        num_layers=1,
        num_kv_heads=_KV_HEADS,
        head_dim=head_dim,
        dtype=inputs.dtype,
        device=inputs.device,
    )
    cache.k.fill_(1e4)
    cache.v.fill_(1e4)
    tables, first = [], 0
    for length, count in zip(lengths, counts, strict=True):
        blocks = list(range(first, first + 2 * count, 2))[::-1]
        first += 2 * count
        table = BlockTable(blocks, _BLOCK_SIZE, inputs.device)
        k, v = inputs.draw(2, length, _KV_HEADS, head_dim)
        cache.write(0, table.slots(0, length), k, v)
        tables.append(table)
    return cache, tables


_BY_HEAD_DIM = {"rope and KV write": rope, "prefill attention": prefill, "decode attention": decode}
