"""Passes of hooked models do not wait for the device: as in tests/unit/programs, on "meta"."""

from __future__ import annotations

from typing import Any

import pytest

from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import ProgramState, SequenceInput
from tests.unit.hooks.tiny import make_program, prompt
from tests.unit.programs.test_no_synchronise import META, NoSynchronise


class NoSynchroniseButEmpty(NoSynchronise):
    """A new cache of transformers is torch.tensor([], device=...): there is nothing to wait for."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") == "tensor" and args[:1] == ([],):
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def run(state: ProgramState) -> None:
    while not state.is_done:
        state.run_slice()
    assert state.logits.device == META


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi3", "GPTNeoX", "Mamba"])
def test_no_pass_of_one_sequence_waits_for_the_device(name: str) -> None:
    program = make_program(name)
    program.lm.model.to(META)
    program.lm._device = META
    with NoSynchroniseButEmpty():
        at = BlockTable(range(5), 16, META)
        run(program.prefill([SequenceInput(prompt(70), 0, at)], Granularity("tile")))
        for start in (70, 71):
            run(program.decode([SequenceInput([5], start, at)]))
        at.extend([5])
        run(program.decode([SequenceInput([5], 72, at)]))
