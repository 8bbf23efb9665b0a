"""Decode steps as graphs: buckets, and steps whose rows are padded give the same bits.

All but the recording by CUDA runs here, in triton's interpreter: what was to be recorded is called
again instead, on the same fixed places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_kernels import (  # first: it skips where triton is not installed
    quick_interpreter,
    row_by_row,
)

# isort: split

from flowprefill.kv.block_table import BlockTable
from flowprefill.loading import LoadedModel
from flowprefill.programs.decode_graphs import (
    MAX_ROWS,
    MAX_SPLITS,
    choose_bucket,
    make_buckets,
)
from flowprefill.programs.program import SequenceInput
from flowprefill.programs.slices import SliceLimits
from flowprefill.programs.triton_operators import TritonOperators
from tests.factories import write_tiny_model
from tests.unit.programs.runs import CPU, WHOLE, load_quietly, run_to_end

__all__ = ["quick_interpreter", "row_by_row"]

LIMITS = SliceLimits(tile_rows=32, attention_work=1 << 30, mlp_rows=16, decode_bytes=0)
"""A layer is a slice."""
NUM_LAYERS = 3
MAX_LEN, MAX_ROWS_HERE = 1024, 4
NUM_BUCKETS = 2 * 3
"""Keys of one split or two, and 1, 2 or 4 rows."""
CONTEXTS = [20, 33, 7, 50, 530]
"""Tokens of each sequence before the step."""
UNTOUCHED = 7.0


class TestBuckets:
    @given(st.integers(1, 200_000), st.integers(1, 300), st.sampled_from([64, 512]))
    def test_the_chosen_one_is_the_smallest_that_holds_the_rows(
        self, max_len: int, num_rows: int, split: int
    ) -> None:
        buckets = sorted(make_buckets(max_len, split))
        for num_keys in {1, split, split + 1, max_len // 2 + 1, max_len}:
            chosen = choose_bucket(buckets, num_rows, num_keys)
            holding = [b for b in buckets if b.num_rows >= num_rows and b.num_keys >= num_keys]
            assert (chosen is None) == (not holding)
            if chosen is not None:
                assert chosen in holding
                assert chosen.num_rows == min(b.num_rows for b in holding)
                assert chosen.num_rows < 2 * num_rows

    @given(st.integers(1, 200_000), st.sampled_from([64, 512]))
    def test_a_lone_row_of_any_length_has_one_up_to_the_splits_allowed(
        self, max_len: int, split: int
    ) -> None:
        num_keys = min(max_len, MAX_SPLITS * split // 4)
        assert choose_bucket(make_buckets(max_len, split), 1, num_keys) is not None

    def test_they_are_few(self) -> None:
        """Each is recorded once a layer, at load."""
        assert len(make_buckets(8192, 512)) == 23
        assert len(make_buckets(131_072, 512)) == 31

    def test_the_largest_hold_no_more_than_they_may(self) -> None:
        for bucket in make_buckets(131_072, 512):
            assert bucket.num_rows <= MAX_ROWS
            assert bucket.num_rows * bucket.num_keys <= MAX_SPLITS * 512


class Again:
    """A Capturer that calls what was to be recorded again. Counts how often."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            launch()

        return replay


class Steps:
    """A model with graphs, and sequences on scattered blocks whose caches hold random numbers."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        operators = model.program.operators
        assert isinstance(operators, TritonOperators)
        self.operators = operators
        self.capturer = Again()
        operators.record_graphs(self.capturer, MAX_ROWS_HERE)
        self.graphs, operators.graphs = operators.graphs, None
        block_size = model.cache.block_size
        blocks = random.Random(0).sample(range(model.cache.num_blocks), 50)
        self.tables = []
        for context in CONTEXTS:
            num_blocks = context // block_size + 1
            self.tables.append(BlockTable(blocks[:num_blocks], block_size, CPU))
            del blocks[:num_blocks]
        self.reset()

    def reset(self) -> None:
        cache = self.model.cache
        cache.k.fill_(UNTOUCHED)
        cache.v.fill_(UNTOUCHED)
        for values in (cache.k, cache.v):
            rows = values.flatten(1, 2)
            for seed, (table, context) in enumerate(zip(self.tables, CONTEXTS, strict=True)):
                slots = table.slots(0, context)
                generator = torch.Generator().manual_seed(seed)
                rows[:, slots] = torch.randn(rows[:, slots].shape, generator=generator)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self.operators.graphs = self.graphs
        try:
            yield
        finally:
            self.operators.graphs = None

    def inputs(self, members: Sequence[int]) -> list[SequenceInput]:
        return [SequenceInput([10 + i], CONTEXTS[i], self.tables[i]) for i in members]

    def step(self, members: Sequence[int]) -> Tensor:
        return run_to_end(self.model.program.decode(self.inputs(members)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, "qwen2", num_layers=NUM_LAYERS, tied=True, max_len=MAX_LEN)


@pytest.fixture
def steps(path: Path) -> Steps:
    return Steps(load_quietly(path, limits=LIMITS, kernels="triton", block_size=16))


@pytest.mark.usefixtures("row_by_row", "quick_interpreter")
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here")
class TestSteps:
    def test_each_bucket_s_layers_are_recorded(self, steps: Steps) -> None:
        assert steps.capturer.num_captured == NUM_BUCKETS * NUM_LAYERS

    @pytest.mark.parametrize("members", [[0], [3, 1], [0, 1, 2], [4, 3, 2, 1]])
    def test_a_padded_step_has_the_bits_of_one_that_is_not(
        self, members: list[int], steps: Steps
    ) -> None:
        expected = steps.step(members)
        k, v = steps.model.cache.k.clone(), steps.model.cache.v.clone()
        steps.reset()
        with steps.replaying():
            logits = steps.step(members)
        assert steps.capturer.num_replayed == NUM_LAYERS
        assert torch.equal(logits, expected)
        num_owned = steps.model.cache.num_blocks
        assert torch.equal(steps.model.cache.k[:, :num_owned], k[:, :num_owned])
        assert torch.equal(steps.model.cache.v[:, :num_owned], v[:, :num_owned])

    def test_rows_of_a_larger_step_before_leave_nothing(self, steps: Steps) -> None:
        expected = steps.step([2, 4, 1])
        steps.reset()
        with steps.replaying():
            steps.step([0, 1, 2, 3])
            steps.reset()
            assert torch.equal(steps.step([2, 4, 1]), expected)

    def test_steps_may_take_turns_slice_by_slice(self, steps: Steps) -> None:
        members = [[0, 3], [2, 1], [4]]  # two of the same bucket
        expected = [steps.step(m) for m in members]
        steps.reset()
        with steps.replaying():
            states = [steps.model.program.decode(steps.inputs(m)) for m in members]
            while not all(state.is_done for state in states):
                for state in states:
                    if not state.is_done:
                        state.run_slice()
        assert steps.capturer.num_replayed == len(members) * NUM_LAYERS
        for state, logits in zip(states, expected, strict=True):
            assert torch.equal(state.logits, logits)

    def test_a_step_may_begin_in_graphs_and_go_on_without(self, steps: Steps) -> None:
        expected = steps.step([0, 1, 2])
        steps.reset()
        state = steps.model.program.decode(steps.inputs([0, 1, 2]))
        with steps.replaying():
            state.run_slice()
        assert torch.equal(run_to_end(state), expected)

    def test_more_rows_than_any_bucket_holds_are_launched_one_by_one(self, steps: Steps) -> None:
        expected = steps.step([0, 1, 2, 3, 4])
        steps.reset()
        with steps.replaying():
            assert torch.equal(steps.step([0, 1, 2, 3, 4]), expected)
        assert steps.capturer.num_replayed == 0

    def test_padding_writes_into_no_block_that_anybody_may_own(self, steps: Steps) -> None:
        with steps.replaying():
            steps.step([0, 1, 2])
        cache = steps.model.cache
        written = (cache.k != UNTOUCHED).flatten(3).any(-1)[0].flatten()  # of each slot
        owned = torch.cat([table.slots(0, CONTEXTS[i] + 1) for i, table in enumerate(steps.tables)])
        others = set(written.nonzero().flatten().tolist()).difference(owned.tolist())
        assert others == {cache.num_blocks * cache.block_size}

    def test_a_prefill_s_head_runs_as_a_graph_too(self, steps: Steps) -> None:
        prompts = [SequenceInput(list(range(n)), 0, steps.tables[i]) for i, n in ((0, 20), (1, 9))]
        expected = run_to_end(steps.model.program.prefill(prompts, WHOLE))
        with steps.replaying():
            logits = run_to_end(steps.model.program.prefill(prompts, WHOLE))
        assert torch.equal(logits, expected)
        assert steps.capturer.num_replayed == 1
