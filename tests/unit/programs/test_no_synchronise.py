"""Nothing that a pass does between two slices waits for the device.

On the device "meta", whose tensors have no values: whatever needs one on the host (item, tolist,
nonzero, a mask as an index, a copy to the CPU) fails there by itself. What torch does silently, a
copy from memory that is not pinned, is looked for in the calls: a list or a CPU tensor as an index,
torch.tensor with a device, a copy to the device that is not said to be non-blocking. On CUDA each
of these waits for everything launched before. Of the Triton kernels' own code, which cannot run
here, `flowprefill gpu-check` says the same on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache
from flowprefill.kv.host_copies import floats_to_device, to_device
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.program import SequenceInput
from flowprefill.programs.slices import SliceLimits
from flowprefill.programs.torch_operators import TorchOperators
from flowprefill.programs.weights import DecoderWeights, LayerWeights
from tests.unit.programs.runs import run_to_end
from tests.unit.programs.test_slices import make_spec

META = torch.device("meta")
BLOCK = 16


class Synchronises(Exception):
    """On CUDA this call would wait for the device."""


class NoSynchronise(TorchFunctionMode):
    """Fails a call that would wait on CUDA, with tensors on META in its stead."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name in ("__getitem__", "__setitem__") and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(_is_on_host(i) for i in index):
                raise Synchronises(f"{name} with an index on the host: {args[1]!r}")
        if name == "__setitem__" and args[0].device == META and _is_on_host(args[2]):
            raise Synchronises("__setitem__ of values on the host")
        if name in ("tensor", "as_tensor") and kwargs.get("device") == META:
            raise Synchronises(f"{name} with device=")
        result = func(*args, **kwargs)
        source = args[1] if name == "copy_" else args[0] if args else None
        is_copy = name in ("to", "copy_", "cuda") and isinstance(source, Tensor)
        if is_copy and source.device != result.device:
            is_upload = source.device.type == "cpu" and kwargs.get("non_blocking")
            if not is_upload:
                raise Synchronises(f"{name} from {source.device} to {result.device}")
        return result


def _is_on_host(index: object) -> bool:
    if isinstance(index, Tensor):
        return index.device.type == "cpu" and index.dim() > 0
    return isinstance(index, (list, range))


def make_program() -> DecoderProgram:
    spec = replace(
        make_spec(),
        vocab_size=300,
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        qk_norm=True,
        qkv_bias=True,
    )

    def weight(*shape: int) -> Tensor:
        return torch.empty(shape, device=META)

    hidden, q_size, kv_size = spec.hidden_size, spec.q_size, spec.kv_size
    layers = [
        LayerWeights(
            input_norm=weight(hidden),
            qkv=weight(q_size + 2 * kv_size, hidden),
            qkv_bias=weight(q_size + 2 * kv_size),
            q_norm=weight(spec.head_dim),
            k_norm=weight(spec.head_dim),
            o_proj=weight(hidden, q_size),
            post_norm=weight(hidden),
            gate_up=weight(2 * spec.intermediate_size, hidden),
            down=weight(hidden, spec.intermediate_size),
        )
        for _ in range(spec.num_layers)
    ]
    weights = DecoderWeights(
        embed=weight(300, hidden), layers=layers, norm=weight(hidden), lm_head=weight(300, hidden)
    )
    cache = KVCache(
        64,
        BLOCK,
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        device=META,
    )
    limits = SliceLimits(tile_rows=64, attention_work=64 * 64, mlp_rows=32)
    return DecoderProgram(spec, TorchOperators(spec, weights, cache), limits)


def prompts(lengths: list[int], scattered: bool) -> list[SequenceInput]:
    """Each with room for a further token."""
    inputs, first = [], 0
    for length in lengths:
        num_blocks = length // BLOCK + 1
        blocks = list(range(first, first + num_blocks))
        table = BlockTable(blocks[::-1] if scattered else blocks, BLOCK, META)
        inputs.append(SequenceInput(list(range(length)), 0, table))
        first += num_blocks
    return inputs


@pytest.mark.parametrize("granularity", ["tile", "op", "chunk:50"])
@pytest.mark.parametrize("lengths", [[150], [70, 20, 1]])
@pytest.mark.parametrize("scattered", [False, True])
def test_a_prefill_does_not_wait(granularity: str, lengths: list[int], scattered: bool) -> None:
    program = make_program()
    with NoSynchronise():
        state = program.prefill(prompts(lengths, scattered), Granularity.parse(granularity))
        logits = run_to_end(state)
    assert logits.device == META and logits.shape == (len(lengths), 300)


@pytest.mark.parametrize("attention_work", [64 * 64, 16 * 20, 1 << 20])
def test_a_decode_step_does_not_wait(attention_work: int) -> None:
    """In slices of whole layers, of operators, and of parts of the sequences."""
    program = make_program()
    program.limits = replace(program.limits, attention_work=attention_work)
    inputs = [SequenceInput([5], len(i.token_ids), i.table) for i in prompts([40, 70, 20], True)]
    inputs[0].table.extend([60])
    with NoSynchronise():
        logits = run_to_end(program.decode(inputs))
    assert logits.shape == (3, 300)


def test_a_growing_block_table_does_not_wait() -> None:
    with NoSynchronise():
        table = BlockTable([3, 4], BLOCK, META)
        for block in range(100):
            table.extend([block])
        assert table.slot(17) == 4 * BLOCK + 1


WAITS: dict[str, Callable[[Tensor], object]] = {
    "a list as an index": lambda x: x[[0, 2]],
    "a list among indices": lambda x: x[:, [0, 2]],
    "a list that is written to": lambda x: x.__setitem__([0, 2], 1.0),
    "an index on the CPU": lambda x: x[torch.tensor([0, 2])],
    "values from the CPU": lambda x: x.__setitem__(0, torch.ones(4)),
    "a mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "a branch": lambda x: bool(x.sum() > 0),
    "cpu": lambda x: x.cpu(),
    "a new tensor on the device": lambda x: torch.tensor([1, 2], device=x.device),
    "a blocking copy": lambda x: torch.ones(4).to(x.device),
    "a blocking copy into": lambda x: x.copy_(torch.ones(4, 4)),
}


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_found(name: str) -> None:
    x = torch.empty(4, 4, device=META)
    with NoSynchronise(), pytest.raises((Synchronises, NotImplementedError, RuntimeError)):
        WAITS[name](x)


def test_what_does_not_wait_is_let_through() -> None:
    x = torch.empty(4, 4, device=META)
    with NoSynchronise():
        rows = to_device([0, 2], META)
        assert x[rows, 1:].shape == (2, 3)
        x[rows] = x[:2]
        x[0, 1] = 3.0
        assert floats_to_device([[0.5, 1.0]], META).shape == (1, 2)
