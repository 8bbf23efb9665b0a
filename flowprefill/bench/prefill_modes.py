"""One prompt prefilled in this process: as the engine does it, and without what slicing costs.

sliced: through the executor, which may be told to leave at each boundary. unchecked: the same
slices in a plain loop without it; kernels that run several slices in a call look at an interrupt
that is never due. whole: each operator over all rows of the prompt in one slice, in a plain loop.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence

from flowprefill.clock import MonotonicClock
from flowprefill.executor.executor import Executor
from flowprefill.executor.sampler import Sampler, SamplingState
from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.program import Program, ProgramState, SequenceInput
from flowprefill.sampling_params import SamplingParams

MODES = ("sliced", "unchecked", "whole")
_GREEDY = SamplingParams(temperature=0.0)
_NEVER_S = 1e18
"""The time of a timer that does not fire."""


class Prefiller:
    """Prefills prompts on a loaded model whose KV cache nobody else uses."""

    def __init__(self, model: LoadedModel, predictor: FittedPredictor) -> None:
        self._model = model
        self._clock = MonotonicClock()
        self._executor = Executor(model.device, self._clock, predictor.profiled_s)
        self._interrupt = Interrupt(self._clock)
        self._interrupt.timer_s = _NEVER_S
        self._never = Interrupt(self._clock)
        self._sampler = Sampler(model.spec.vocab_size)

    def seconds(self, mode: str, token_ids: Sequence[int]) -> float:
        """Time from the prompt to its first token, seconds. mode: one of MODES."""
        start_s = time.perf_counter()
        if mode == "whole":
            program: Program = with_whole_operators(self._model.program, len(token_ids))
            state = self._start(program, token_ids, Granularity("op"))
        else:
            state = self._start(self._model.program, token_ids, Granularity("tile"))
        if mode == "sliced":
            self._executor.run(state, self._interrupt)
        else:
            self._run_unchecked(state)
        self._sampler.sample(state.logits, [SamplingState(_GREEDY, (), (), seed=0)])
        return time.perf_counter() - start_s

    def _start(
        self, program: Program, token_ids: Sequence[int], granularity: Granularity
    ) -> ProgramState:
        block_size = self._model.cache.block_size
        blocks = range(-(-len(token_ids) // block_size))
        table = BlockTable(blocks, block_size, self._model.device.torch_device)
        return program.prefill([SequenceInput(token_ids, 0, table)], granularity)

    def _run_unchecked(self, state: ProgramState) -> None:
        run = self._model.device.run
        while not state.is_done:
            run(state.run_slice, 0.0, self._never)
        self._model.device.wait()


def with_whole_operators(program: DecoderProgram, num_tokens: int) -> DecoderProgram:
    """The same weights, with slices that hold any operator of prompts of up to num_tokens."""
    program = copy.copy(program)
    program.limits = dataclasses.replace(
        program.limits,
        tile_rows=num_tokens,
        mlp_rows=None,
        # more: attention takes rows by sixteens
        attention_work=(num_tokens + 16) * num_tokens,
    )
    return program
