"""The profile of a tiny model: which slices are timed, and that a broken bit rule is seen."""

from __future__ import annotations

import random
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
from flowprefill.predictor.features import FEATURE_NAMES, slice_features, slice_kind
from flowprefill.predictor.fitted import FittedPredictor, fit
from flowprefill.predictor.profile import Profile
from flowprefill.predictor.profiler import (
    PASS_S,
    ROUNDS,
    Profiler,
    decode_batches,
    prefill_spans,
)
from flowprefill.programs.program import Program, ProgramState, SequenceInput
from flowprefill.programs.slices import Group, Slice, SliceLimits, max_decode_keys
from tests.factories import write_tiny_model
from tests.unit.programs.runs import load_quietly

LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 128)
TILES = LIMITS.key_tiles


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"))


def quick(piece: Slice) -> float:
    return 1e-4


class Run:
    """One profile in virtual time, in which each slice takes what `seconds` says."""

    def __init__(
        self,
        model: LoadedModel,
        program: Program | None = None,
        seconds: Callable[[Slice], float] = quick,
    ) -> None:
        self.clock = VirtualClock()
        self.pieces: list[Slice] = []
        self.progress: list[float] = []
        self.num_choices = 0
        self.is_new_pass = True
        self._state: object = None
        self._model = model
        self._seconds = seconds
        self.profiler = Profiler(
            program or model.program,
            model.program.limits,
            self._run,
            self.clock,
            self._new_table,
            self._choose,
            model.spec.vocab_size,
        )

    def profile(self, max_tokens: int) -> Profile:
        return self.profiler.profile(max_tokens, self.progress.append)

    def _run(self, run_slice: Callable[[], bool]) -> bool:
        state = run_slice.__self__  # type: ignore[attr-defined]
        self.is_new_pass = state is not self._state
        self._state = state
        self.pieces.append(state.next_slice)
        self.clock.advance_to(self.clock.now_s() + self._seconds(state.next_slice))
        return run_slice()

    def _new_table(self, index: int, num_tokens: int) -> BlockTable:
        size = self._model.cache.block_size
        num_blocks = -(-num_tokens // size)
        first = index * num_blocks % (self._model.cache.num_blocks - num_blocks + 1)
        return BlockTable(range(first, first + num_blocks), size, torch.device("cpu"))

    def _choose(self, logits: Tensor) -> None:
        self.num_choices += 1
        self.clock.advance_to(self.clock.now_s() + 1e-3 + 2e-4 * len(logits))


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
    profile = Run(load_quietly(directory, limits=LIMITS)).profile(512)
    shapes: dict[str, set[tuple[float, ...]]] = {}
    for piece, seconds in profile.samples:
        assert seconds == pytest.approx(1e-4)
        shapes.setdefault(slice_kind(piece), set()).add(slice_features(piece, TILES))
    assert shapes.keys() == FEATURE_NAMES.keys()
    assert all(len(sizes) > 2 for sizes in shapes.values())
    assert len(profile.samples) == sum(map(len, shapes.values())), "a shape is there twice"


def test_the_choice_of_tokens_is_timed_for_each_batch(directory: Path) -> None:
    profile = Run(load_quietly(directory, limits=LIMITS)).profile(512)
    assert [rows for rows, _ in profile.choices] == [1, 4, 16]
    for rows, seconds in profile.choices:
        assert seconds == pytest.approx(1e-3 + 2e-4 * rows)


def test_a_slow_device_runs_one_layer_of_most_passes(tmp_path: Path) -> None:
    model = load_quietly(write_tiny_model(tmp_path, num_layers=8), limits=LIMITS)
    run = Run(model, seconds=lambda piece: 2 * PASS_S)
    profile = run.profile(512)
    quick_run = Run(model)
    complete = quick_run.profile(512)
    assert len(run.pieces) < len(quick_run.pieces) / 2
    shapes, all_of_them = (
        {slice_features(s, TILES) for s, _ in p.samples} for p in (profile, complete)
    )
    missed = all_of_them - shapes
    assert all(len(features) == 2 for features in missed), "more than ends of long passes"


def test_of_several_rounds_the_quickest_counts(directory: Path) -> None:
    """One that runs while another process has the core does not show."""
    run = Run(load_quietly(directory, limits=LIMITS))
    busy_s = run.profile(512).calibration_s / ROUNDS  # about that of one round

    def seconds(piece: Slice) -> float:
        return 1e-4 if run.clock.now_s() > busy_s else 2e-4

    run = Run(load_quietly(directory, limits=LIMITS), seconds=seconds)
    profile = run.profile(512)
    repeated = [s for p, s in profile.samples if p.group is not Group.HEAD]
    assert repeated.count(pytest.approx(1e-4)) > 0.9 * len(repeated)


def test_the_first_slice_of_a_shape_in_a_pass_is_left_out(directory: Path) -> None:
    seen: set[tuple[str, tuple[float, ...]]] = set()

    def seconds(piece: Slice) -> float:
        shape = slice_kind(piece), slice_features(piece, TILES)
        if piece.group is Group.QKV and piece.start == 0 and run.is_new_pass:
            seen.clear()
        is_first = shape not in seen
        seen.add(shape)
        return 3e-4 if is_first else 1e-4  # what is cold

    run = Run(load_quietly(directory, limits=LIMITS), seconds=seconds)
    layers = {"qkv", "attention", "decode_attention", "mlp", "layers"}
    for piece, found in run.profile(512).samples:
        if slice_kind(piece) in layers:
            assert found == pytest.approx(1e-4), piece


def test_rounds_that_agree_make_a_steady_profile(directory: Path) -> None:
    model = load_quietly(directory, limits=LIMITS)
    assert Run(model).profile(512).is_steady
    draw = random.Random(0)
    assert Run(model, seconds=lambda piece: draw.uniform(9e-5, 11e-5)).profile(512).is_steady
    busy = Run(model, seconds=lambda piece: draw.choice([1e-4, 3e-4])).profile(512)
    assert not busy.is_steady


def test_progress_rises_to_one(directory: Path) -> None:
    run = Run(load_quietly(directory))
    run.profile(512)
    assert run.progress == sorted(set(run.progress)) and run.progress[-1] == 1.0


def test_it_says_how_long_it_took(directory: Path) -> None:
    run = Run(load_quietly(directory, limits=LIMITS))
    assert run.profile(512).calibration_s == run.clock.now_s() > 0


def test_warming_up_takes_a_prefill_a_decode_step_and_a_choice(directory: Path) -> None:
    run = Run(load_quietly(directory, limits=LIMITS))
    run.profiler.warm_up(512)
    assert {slice_kind(p) for p in run.pieces} >= {"head", "logits"}
    assert max(p.num_rows for p in run.pieces) == 16
    assert run.num_choices == 1


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


@pytest.mark.parametrize("max_tokens", [2, 3, 100, 512, 8192, 131_072])
@pytest.mark.parametrize("limits", [LIMITS, SliceLimits(512, 434_027), SliceLimits(8192, 12 << 20)])
def test_passes_reach_to_the_longest_context_in_pieces_of_a_tile(
    limits: SliceLimits, max_tokens: int
) -> None:
    spans = prefill_spans(limits, max_tokens)
    assert max(span.end for span in spans) == max_tokens - 1
    assert all(0 <= s.start < s.end and s.end - s.start <= limits.tile_rows for s in spans)
    assert any(s.end - s.start == min(limits.tile_rows, max_tokens - 1) for s in spans)
    batches = decode_batches(limits, max_tokens)
    assert max(batch[0] for batch in batches) == max_tokens - 1
    assert all(1 <= n < max_tokens for batch in batches for n in batch)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_fit_of_a_profile_predicts_passes(tmp_path: Path, num_layers: int) -> None:
    model = load_quietly(write_tiny_model(tmp_path, num_layers=num_layers), limits=LIMITS)
    found = fit(Run(model).profile(512).samples, TILES)
    predictor = FittedPredictor(found, num_layers, LIMITS)
    # a prompt of two tiles: three slices for each in a full layer, then two and the head
    assert predictor.prefill_s(128) == pytest.approx(1e-4 * (6 * (num_layers - 1) + 3))
    assert predictor.decode_step_s(2, 100) == pytest.approx(1e-4 * (num_layers + 1))
    many = max_decode_keys(LIMITS) + 1
    assert predictor.decode_step_s(2, many) == pytest.approx(1e-4 * (3 * num_layers + 1))


def test_every_pass_is_timed_in_several_rounds(directory: Path) -> None:
    run = Run(load_quietly(directory, limits=LIMITS))
    run.profile(512)
    firsts = [p for p in run.pieces if slice_kind(p) == "qkv" and p.start == 0]
    assert ROUNDS > 1
    assert len(firsts) > ROUNDS * len(prefill_spans(LIMITS, 512))
