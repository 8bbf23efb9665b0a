"""Compile the kernels ahead of time, without a GPU: registers, spills and shared memory by ptxas.

    python -m flowprefill.kernels.compile_report sm_90 [--head-dims 64,128]

prints a line for each kernel and then all of them as JSON. Spilled registers are what makes a
kernel slow without a word. Without TRITON_INTERPRET.
"""

# mypy: allow-untyped-calls
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from flowprefill.kernels import activation, attention, rmsnorm, rope, sampling

TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
"""A100, H100, B200."""
HEAD_DIMS = (64, 96, 128, 256)
_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16
_HIDDEN, _INTERMEDIATE = 4096, 14336
_FP32 = ["weight_ptr", "cos_ptr", "sin_ptr", "q_norm_ptr", "k_norm_ptr"]
_FP32 += ["partial_ptr", "sums_ptr", "eps", "q_scale"]
_FP32 += ["logits_ptr", "draws_ptr", "choices_ptr"]
_INT64 = ["positions_ptr", "slots_ptr", "sequences_ptr"]
_UNALIGNED = (*_INT64, "num_splits")
"""What the kernels do not specialise on, so nothing is known of its alignment."""


@dataclass(frozen=True)
class Case:
    """A kernel and what it is compiled for."""

    name: str
    function: Any
    constants: dict[str, Any]
    num_warps: int
    num_stages: int = 2


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel."""

    name: str
    target: str
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Stored and loaded, of a thread."""
    shared_bytes: int


def cases(head_dims: Sequence[int] = HEAD_DIMS) -> Iterator[Case]:
    """The kernels at the shapes of Llama-3.1-8B, attention at each of these head_dims; bf16."""
    block, num_warps = rmsnorm.block_of(_HIDDEN)
    constants: dict[str, Any] = {"HAS_DELTA": True, "BLOCK": block}
    yield Case("add_rmsnorm", rmsnorm.rmsnorm_kernel, constants, num_warps)
    constants = {"HAS_DELTA": False, "BLOCK": block, "delta_ptr": None}
    yield Case("rmsnorm", rmsnorm.rmsnorm_kernel, constants, num_warps)
    constants = {"BLOCK": activation.BLOCK}
    yield Case("silu_and_mul", activation.silu_and_mul_kernel, constants, activation.NUM_WARPS)
    constants = {"BLOCK": sampling.BLOCK}
    yield Case("choose", sampling.choose_kernel, constants, sampling.NUM_WARPS)
    for head_dim in head_dims:
        yield from _of_head_dim(head_dim)


def _of_head_dim(head_dim: int) -> Iterator[Case]:
    heads = {
        "HEADS": _HEADS,
        "KV_HEADS": _KV_HEADS,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_POW2": triton.next_power_of_2(head_dim),
    }
    norm: dict[str, Any] = {"HEAD_BLOCK": rope.HEAD_BLOCK, "HAS_NORM": True}
    yield Case(f"norm and rope d{head_dim}", rope.rope_kernel, {**heads, **norm}, rope.NUM_WARPS)
    norm |= {"HAS_NORM": False, "q_norm_ptr": None, "k_norm_ptr": None}
    yield Case(f"rope d{head_dim}", rope.rope_kernel, {**heads, **norm}, rope.NUM_WARPS)
    prefill = attention.prefill_tiling(head_dim, torch.bfloat16)
    decode = attention.decode_tiling(head_dim, torch.bfloat16)
    tilings = {
        "prefill": (prefill, False),
        "long prefill": (prefill, True),
        "decode": (decode, True),
    }
    for name, (tiling, is_split) in tilings.items():
        tiles = {
            "BLOCK_SIZE": _BLOCK_SIZE,
            "BLOCK_M": tiling.rows,
            "BLOCK_N": tiling.keys,
            "SPLIT": tiling.split,
            "IS_SPLIT": is_split,
        }
        constants, warps, stages = {**heads, **tiles}, tiling.num_warps, tiling.num_stages
        kernel = attention.attention_kernel
        yield Case(f"{name} attention d{head_dim}", kernel, constants, warps, stages)
    constants = {**heads, "SPLIT": decode.split, "SPLIT_BLOCK": attention.SPLIT_BLOCK}
    del constants["KV_HEADS"]
    name, warps = f"combine d{head_dim}", attention.COMBINE_WARPS
    yield Case(name, attention.combine_kernel, constants, warps)


def compile_case(case: Case, target: str) -> Compiled:
    """Compile without caches. Raises what triton raises, a PTXASError for example."""
    assert not triton.knobs.runtime.interpret, "TRITON_INTERPRET is set"
    names = case.function.arg_names
    signature = {n: "constexpr" if n in case.constants else _type(n) for n in names}
    aligned = [i for i, n in enumerate(names) if n not in (*case.constants, *_UNALIGNED)]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned if signature[names[i]] != "fp32"}
    source = ASTSource(case.function, signature, case.constants, attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    said = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as directory,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(said),
    ):
        triton.knobs.cache.dir = directory
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, GPUTarget("cuda", TARGETS[target], 32), options)
    return _read(case.name, target, said.getvalue(), kernel.metadata.shared)


def _type(name: str) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name in _FP32 else "i32"
    return "*fp32" if name in _FP32 else "*i64" if name in _INT64 else "*bf16"


def _read(name: str, target: str, log: str, shared_bytes: int) -> Compiled:
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    assert len(registers) == 1 and spills, f"{name}: ptxas says something new: {log}"
    return Compiled(name, target, int(registers[0]), sum(map(int, spills)), shared_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--head-dims", default=",".join(map(str, HEAD_DIMS)))
    args = parser.parse_args()
    found = []
    for target in args.targets:
        for case in cases([int(n) for n in args.head_dims.split(",")]):
            compiled = compile_case(case, target)
            found.append(asdict(compiled))
            print(
                f"{target:7} {compiled.name:28} {compiled.registers:4} registers "
                f"{compiled.spilled_bytes:5} bytes spilled {compiled.shared_bytes:7} bytes shared",
                flush=True,
            )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
