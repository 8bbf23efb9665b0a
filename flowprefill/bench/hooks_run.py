"""The measuring part of `flowprefill bench hooks`: a model with boundaries and without.

All models share one set of weights: where they lie in memory, in which pages, favours none.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from flowprefill.bench.options import prompt_tokens
from flowprefill.bench.prefill import random_tokens
from flowprefill.bench.prefill_rounds import Rounds, run_rounds
from flowprefill.clock import MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.executor.device import make_device, model_dtype
from flowprefill.granularity import Granularity
from flowprefill.hooks.availability import length_limit, text_config
from flowprefill.hooks.boundaries import decoder_layers
from flowprefill.hooks.causal_lm import CausalLM
from flowprefill.hooks.loading import load_causal_lm, tile_rows
from flowprefill.hooks.program import HookedProgram
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.programs.program import ProgramState, SequenceInput

PLAIN, HOOKED, TILES = "plain", "hooked", "tiles"
PARTS, LAYERS = "parts", "layers"
"""Boundaries by the structure of a model; all else that can be asked for are class names."""
_BLOCK_TOKENS = 16


class HookBench:
    """Runs prompts on a model and on hooked twins of it; nothing else uses the device."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model, a Hugging Face folder. Raises ConfigError or ModelLoadError."""
        self._device = make_device(config.device, config.max_slice_ms / 1000, config.num_threads)
        dtype = model_dtype(config, self._device)
        path = resolve_model_path(config.model)
        self._plain, _ = load_causal_lm(path, dtype, self._device.torch_device)
        self._never = Interrupt(MonotonicClock())
        self._config: Any = self._plain.config
        text = text_config(self._config)
        self._vocab_size: int = text.vocab_size
        self.max_tokens = length_limit(text)

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._plain.parameters())

    def class_names(self, boundaries: str) -> tuple[str, ...]:
        """`hook_boundaries` of what was asked for: `parts`, `layers` or classes and commas."""
        if boundaries == PARTS:
            return ()
        if boundaries == LAYERS:
            return tuple(sorted({type(layer).__name__ for layer in decoder_layers(self._plain)}))
        return tuple(boundaries.split(","))

    def tokens_of(self, asked: int) -> int:
        """Tokens of a prompt of that length; see prompt_tokens."""
        return asked if self.max_tokens is None else prompt_tokens(asked, self.max_tokens)

    def overhead(
        self, num_tokens: int, rounds: int, budget_s: float, seed: int, on_round: Callable[[], None]
    ) -> Rounds:
        """Rounds of the plain forward pass, of the same one left at each boundary, and of the
        engine's passes over tiles."""
        lm = CausalLM(twin(self._plain))
        program = HookedProgram(lm, tile_rows(self._device, self._config))

        def plain(tokens: Sequence[int]) -> None:
            with torch.inference_mode():
                self._plain(**lm.arguments(tokens, None))

        def hooked(tokens: Sequence[int]) -> None:
            forward = lm.start(tokens, None)
            while not forward.run():
                pass

        def tiles(tokens: Sequence[int]) -> None:
            state = self._start(program, tokens, Granularity("tile"))
            while not state.is_done:
                state.run_slice()

        ways = {PLAIN: plain, HOOKED: hooked, TILES: tiles}
        timed = {name: self._timed(way, num_tokens) for name, way in ways.items()}
        return run_rounds(timed, rounds, budget_s, seed, on_round)

    def parked(self, boundaries: str, granularity: Granularity, num_tokens: int) -> tuple[int, int]:
        """Slices of a pass with these boundaries, and the bytes that a prefill holds where it holds
        most, its keys and values left out. Raises ConfigError for a class that the model lacks."""
        lm = CausalLM(twin(self._plain), self.class_names(boundaries))
        program = HookedProgram(lm, tile_rows(self._device, self._config))
        tokens = random_tokens(self._vocab_size, num_tokens, seed=0)
        state, most = self._start(program, tokens, granularity), 0
        while not state.is_done:
            state.run_slice()
            most = max(most, state.live_bytes)
        return lm.num_slices, most

    def _timed(
        self, way: Callable[[Sequence[int]], None], num_tokens: int
    ) -> Callable[[int], float]:
        def seconds(seed: int) -> float:
            tokens = random_tokens(self._vocab_size, num_tokens, seed)

            def run_all(interrupt: Interrupt | None) -> bool:
                way(tokens)
                return False

            start_s = time.perf_counter()
            self._device.run(run_all, 0.0, self._never)
            self._device.wait()
            return time.perf_counter() - start_s

        return seconds

    def _start(
        self, program: HookedProgram, tokens: Sequence[int], granularity: Granularity
    ) -> ProgramState:
        blocks = range(-(-len(tokens) // _BLOCK_TOKENS))
        table = BlockTable(blocks, _BLOCK_TOKENS, self._device.torch_device)
        return program.prefill([SequenceInput(tokens, 0, table)], granularity)


def twin(model: nn.Module) -> nn.Module:
    """The same model a second time, with the same weights but modules, and hooks, of its own."""
    shared: dict[int, Any] = {id(weight): weight for weight in model.parameters()}
    return copy.deepcopy(model, shared)
