"""Triton kernels on a card, in bf16: a pass parked anywhere has the bits of one never parked."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_kernels import DEVICE  # first: it skips where triton is not installed

# isort: split

from flowprefill.bench.gpu.program_checks import refusing_to_synchronise
from flowprefill.config import EngineConfig
from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel, load_model
from flowprefill.programs.operators import Attended
from flowprefill.programs.program import ProgramState, SequenceInput
from flowprefill.programs.slices import SliceLimits
from flowprefill.programs.triton_operators import TritonOperators
from tests.factories import write_tiny_model
from tests.unit.programs.runs import random_tokens, run_to_end

NUM_LAYERS = 2
LIMITS = SliceLimits(tile_rows=32, attention_work=16 * 64, mlp_rows=16)
LENGTHS = (70, 33, 50)
GRANULARITIES = ("tile", "op", "chunk:20")
WHOLE_LAYERS = replace(LIMITS, attention_work=1 << 30)
"""Slices of decode steps that graphs can be of."""

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", num_layers=NUM_LAYERS)
    # the interpreter has no bf16 product
    dtype = "bfloat16" if DEVICE.type == "cuda" else "float32"
    config = EngineConfig(
        str(path),
        device=DEVICE.type,
        dtype=dtype,
        kernels="triton",
        kv_cache_memory_bytes=2**24,
    )
    loaded = load_model(config, lambda stage, fraction: None)
    loaded.program.limits = LIMITS
    return loaded


def start_all(model: LoadedModel) -> list[ProgramState]:
    """A prefill of each length and granularity, on blocks of its own dealt at random."""
    cache = model.cache
    blocks = random.Random(0).sample(range(cache.num_blocks), cache.num_blocks)
    states: list[ProgramState] = []
    for i, (length, granularity) in enumerate(zip(LENGTHS, GRANULARITIES, strict=True)):
        num_blocks = -(-length // cache.block_size)
        table = BlockTable(blocks[:num_blocks], cache.block_size, DEVICE)
        del blocks[:num_blocks]
        prompt = SequenceInput(random_tokens(length, seed=i), 0, table)
        states.append(model.program.prefill([prompt], Granularity.parse(granularity)))
    return states


def interleaved(states: list[ProgramState]) -> list[Tensor]:
    """Logits of passes of which a random one runs its next slice, until all are done."""
    draw, waiting = random.Random(1), list(states)
    while waiting:
        state = draw.choice(waiting)
        state.run_slice()
        if state.is_done:
            waiting.remove(state)
    return [state.logits for state in states]


def test_parking_changes_no_bit(model: LoadedModel) -> None:
    alone = [run_to_end(state) for state in start_all(model)]
    model.cache.k.fill_(torch.nan)
    model.cache.v.fill_(torch.nan)
    for ours, theirs in zip(interleaved(start_all(model)), alone, strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, theirs)


def started_sequences(model: LoadedModel) -> list[SequenceInput]:
    """The next token of sequences whose prompts are in the cache."""
    cache, first, inputs = model.cache, 0, []
    for i, length in enumerate(LENGTHS):
        num_blocks = length // cache.block_size + 1
        table = BlockTable(range(first, first + num_blocks), cache.block_size, DEVICE)
        first += num_blocks
        prompt = SequenceInput(random_tokens(length, seed=i), 0, table)
        run_to_end(model.program.prefill([prompt], Granularity("tile")))
        inputs.append(SequenceInput([7 + i], length, table))
    return inputs


@pytest.fixture
def runs(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a graph ran, each time that one was asked for."""
    operators, ran = model.program.operators, list[bool]()
    assert isinstance(operators, TritonOperators) and operators.graphs, model.kernels
    run = operators.graphs.run

    def counting(layers: range, hidden: Tensor, attended: Attended) -> bool:
        ran.append(run(layers, hidden, attended))
        return ran[-1]

    monkeypatch.setattr(operators.graphs, "run", counting)
    monkeypatch.setattr(model.program, "limits", WHOLE_LAYERS)
    return ran


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_a_step_as_graphs_equals_one_launched_kernel_by_kernel(
    num_rows: int, model: LoadedModel, runs: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = started_sequences(model)[:num_rows]
    runs.clear()  # the ends of their prompts
    replayed = run_to_end(model.program.decode(inputs)).clone()
    assert runs == [True] * NUM_LAYERS
    monkeypatch.setattr(model.program.operators, "graphs", None)
    launched = run_to_end(model.program.decode(inputs))
    if num_rows < 3:  # no padding, so products of the same shapes
        assert torch.equal(replayed, launched)
    torch.testing.assert_close(replayed, launched, atol=0.05, rtol=0.05)


def test_steps_as_graphs_do_not_wait_for_the_device(model: LoadedModel, runs: list[bool]) -> None:
    inputs = started_sequences(model)
    runs.clear()
    with refusing_to_synchronise():
        logits = run_to_end(model.program.decode(inputs))
    assert logits.isfinite().all()
    assert runs == [True] * NUM_LAYERS
