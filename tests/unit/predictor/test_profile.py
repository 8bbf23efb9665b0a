"""The profile of a tiny model: which slices are timed, and that a broken bit rule is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowprefill.clock import VirtualClock
from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel
from flowprefill.predictor.fitted import FittedPredictor, fit, slice_kind
from flowprefill.predictor.profile import Profile, Profiler
from flowprefill.programs.program import Program, ProgramState, SequenceInput
from flowprefill.programs.slices import SliceLimits
from tests.factories import write_tiny_model
from tests.unit.programs.runs import load_quietly

SLICE_S = 0.25
LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 128)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"))


class Run:
    """One profile in virtual time, in which each slice takes SLICE_S."""

    def __init__(self, model: LoadedModel, program: Program | None = None) -> None:
        self.clock = VirtualClock()
        self.num_slices = 0
        self.progress: list[float] = []
        self._model = model
        vocab_size = model.spec.vocab_size
        self._profiler = Profiler(
            program or model.program, self._run, self.clock, self._new_table, vocab_size
        )

    def profile(self, max_tokens: int) -> Profile:
        return self._profiler.profile(max_tokens, self.progress.append)

    def _run(self, run_slice: Callable[[], bool]) -> bool:
        self.num_slices += 1
        self.clock.advance_to(self.clock.now_s() + SLICE_S)
        return run_slice()

    def _new_table(self, index: int, num_tokens: int) -> BlockTable:
        size = self._model.cache.block_size
        num_blocks = -(-num_tokens // size)
        first = index * num_blocks
        assert first + num_blocks <= self._model.cache.num_blocks
        return BlockTable(range(first, first + num_blocks), size, torch.device("cpu"))


class Shifted:
    """A pass whose logits are off by one rounding step."""

    def __init__(self, state: ProgramState) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    @property
    def logits(self) -> Tensor:
        return torch.nextafter(self._state.logits, torch.tensor(torch.inf))


class BrokenProgram:
    """A program in which one kind of pass rounds otherwise."""

    def __init__(self, program: Program, broken: str) -> None:
        self._program = program
        self._broken = broken

    def prefill(self, inputs: Sequence[SequenceInput], granularity: Granularity) -> ProgramState:
        state = self._program.prefill(inputs, granularity)
        return Shifted(state) if self._broken == granularity.kind else state

    def decode(self, inputs: Sequence[SequenceInput]) -> ProgramState:
        state = self._program.decode(inputs)
        return Shifted(state) if self._broken == "decode" else state


def test_every_kind_of_slice_is_timed_in_several_sizes(directory: Path) -> None:
    run = Run(load_quietly(directory, limits=LIMITS))
    profile = run.profile(512)
    shapes: dict[str, set[tuple[int, int]]] = {}
    for piece, seconds in profile.samples:
        assert seconds == SLICE_S
        shapes.setdefault(slice_kind(piece), set()).add((piece.num_rows, piece.num_keys))
    assert shapes.keys() == {"qkv", "attention", "decode_attention", "mlp", "head", "logits"}
    assert all(len(sizes) > 2 for sizes in shapes.values())


def test_the_first_pass_is_no_sample(directory: Path) -> None:
    run = Run(load_quietly(directory, limits=LIMITS))
    profile = run.profile(512)
    warm_up = (3 - 1) * 3 + 2  # slices of a prompt of one tile: two layers, then the last
    assert len(profile.samples) == run.num_slices - warm_up


def test_progress_rises_to_one(directory: Path) -> None:
    run = Run(load_quietly(directory))
    run.profile(512)
    assert run.progress == sorted(set(run.progress)) and run.progress[-1] == 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_program_that_keeps_the_bit_rule_is_found_to_keep_it(directory: Path, dtype: str) -> None:
    assert Run(load_quietly(directory, dtype, LIMITS)).profile(512).is_bit_invariant is True


@pytest.mark.parametrize("broken", ["tile", "chunk", "decode"])
def test_a_pass_that_rounds_otherwise_is_found(directory: Path, broken: str) -> None:
    model = load_quietly(directory, limits=LIMITS)
    run = Run(model, BrokenProgram(model.program, broken))
    assert run.profile(512).is_bit_invariant is False


@pytest.mark.parametrize("max_tokens", [2, 3, 17, 33])
def test_a_short_context_limits_the_passes(directory: Path, max_tokens: int) -> None:
    run = Run(load_quietly(directory, max_model_len=max_tokens))
    profile = run.profile(max_tokens)
    assert profile.is_bit_invariant is True
    prompts = [piece for piece, _ in profile.samples if piece.sequence is not None]
    assert max(piece.num_keys for piece in prompts) == max_tokens - 1


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_fit_of_a_profile_predicts_passes(tmp_path: Path, num_layers: int) -> None:
    model = load_quietly(write_tiny_model(tmp_path, num_layers=num_layers), limits=LIMITS)
    predictor = FittedPredictor(fit(Run(model).profile(512).samples), num_layers, LIMITS)
    # a prompt of two tiles: three slices for each in a full layer, then two and the head
    assert predictor.prefill_s(128) == pytest.approx(SLICE_S * (6 * (num_layers - 1) + 3))
    assert predictor.decode_step_s(2, 100) == pytest.approx(SLICE_S * (3 * num_layers + 1))
