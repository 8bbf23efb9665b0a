"""The native program: transformers' logits, and the same bits however a pass is cut or shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowprefill.clock import MonotonicClock
from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.programs.slices import Group, Slice, SliceLimits
from tests.factories import ARCHITECTURES, write_tiny_model
from tests.native_kernels import KERNELS
from tests.unit.programs.reference import transformers_logits
from tests.unit.programs.runs import TILE, WHOLE, Runner, load_quietly, random_tokens, run_to_end

LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 128)
GRANULARITIES = ["chunk:1", "chunk:7", "chunk:64", "layer", "op", "tile"]
DTYPES = ("float32", "bfloat16")
PROMPT_LENGTHS = (1, 2, 17, 150, 400)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each architecture; mistral's has grouped heads of three."""
    shapes = {"mistral": {"heads": 6, "kv_heads": 2}, "qwen2": {"tied": True}}
    return {
        name: write_tiny_model(tmp_path_factory.mktemp(name), name, **shapes.get(name, {}))
        for name in ARCHITECTURES
    }


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=[("llama", 2), ("qwen3", 1)], ids=("llama", "qwen3"))
def runner(
    request: pytest.FixtureRequest, directories: dict[str, Path], dtype: str, kernels: str
) -> Runner:
    """A model with several tiles, on two threads or on one."""
    architecture, num_threads = request.param
    path = directories[architecture]
    return Runner(load_quietly(path, dtype, LIMITS, num_threads=num_threads, kernels=kernels))


@pytest.fixture
def llama(directories: dict[str, Path]) -> Runner:
    return Runner(load_quietly(directories["llama"], limits=LIMITS))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_transformers(
    architecture: str, directories: dict[str, Path], kernels: str
) -> None:
    runner = Runner(load_quietly(directories[architecture], limits=LIMITS, kernels=kernels))
    for length in PROMPT_LENGTHS:
        prompt = random_tokens(length, seed=length)
        expected = transformers_logits(directories[architecture], prompt, 8)
        logits, tokens = runner.greedy(prompt, 8)
        torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=0)
        assert tokens == expected.token_ids


@pytest.mark.parametrize("length", [1, 2, 65, 200])
def test_every_granularity_gives_the_same_bits(runner: Runner, length: int) -> None:
    prompt = random_tokens(length)
    logits, kv = runner.prefill(prompt, WHOLE), runner.kv(length)
    for text in GRANULARITIES:
        again = runner.prefill(prompt, Granularity.parse(text), sequence=1)
        assert torch.equal(again, logits), text
        assert torch.equal(runner.kv(length, sequence=1), kv), text


def test_packed_prompts_give_the_bits_of_each_alone(runner: Runner) -> None:
    prompts = [random_tokens(n, seed=n) for n in (5, 100, 1, 70)]
    alone = [runner.prefill(p, WHOLE) for p in prompts]
    inputs = [runner.input(p, sequence=i) for i, p in enumerate(prompts)]
    for text in ("whole", "tile", "op", "layer"):
        packed = run_to_end(runner.program.prefill(inputs, Granularity.parse(text)))
        assert torch.equal(packed, torch.stack(alone)), text


def test_a_prompt_behind_cached_tokens_gives_the_bits_of_the_whole(runner: Runner) -> None:
    prompt = random_tokens(150)
    whole = runner.prefill(prompt, TILE)
    for cached in (1, 16, 63, 64, 128, 149):
        assert torch.equal(runner.prefill(prompt[cached:], TILE, start=cached), whole), cached


def test_a_decode_batch_gives_the_bits_of_each_alone(runner: Runner) -> None:
    lengths = (5, 300, 1, 140)
    for i, length in enumerate(lengths):
        runner.prefill(random_tokens(length, seed=i), WHOLE, sequence=i)
    alone = [runner.decode(7 + i, length, sequence=i) for i, length in enumerate(lengths)]
    for chosen in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 2), (3,)):
        inputs = [runner.input([7 + i], lengths[i], i) for i in chosen]
        batch = run_to_end(runner.program.decode(inputs))
        assert torch.equal(batch, torch.stack([alone[i] for i in chosen])), chosen


@pytest.mark.parametrize("length", [1, 15, 64, 128, 300])
def test_a_decode_step_gives_the_bits_of_a_prefill_of_one_more_token(
    runner: Runner, length: int
) -> None:
    tokens = random_tokens(length + 1)
    whole = runner.prefill(tokens, WHOLE)
    runner.prefill(tokens[:-1], WHOLE, sequence=1)
    assert torch.equal(runner.decode(tokens[-1], length, sequence=1), whole)
    assert torch.equal(runner.kv(length + 1, 1), runner.kv(length + 1, 0))


def test_passes_that_alternate_slice_by_slice_give_the_bits_of_each_alone(runner: Runner) -> None:
    prompts = [random_tokens(n, seed=n) for n in (90, 130)]
    alone = [runner.prefill(p, WHOLE) for p in prompts]
    states = [
        runner.program.prefill([runner.input(p, sequence=i)], TILE) for i, p in enumerate(prompts)
    ]
    while not all(state.is_done for state in states):
        for state in states:
            if not state.is_done:
                state.run_slice()
    assert all(torch.equal(s.logits[0], a) for s, a in zip(states, alone, strict=True))


def test_a_model_of_one_layer_equals_transformers(tmp_path: Path, kernels: str) -> None:
    path = write_tiny_model(tmp_path, num_layers=1)
    prompt = random_tokens(40)
    logits, tokens = Runner(load_quietly(path, limits=LIMITS, kernels=kernels)).greedy(prompt, 4)
    expected = transformers_logits(path, prompt, 4)
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=0)
    assert tokens == expected.token_ids


class TestBoundaries:
    """What run_slice answers, slice by slice."""

    def answers(self, llama: Runner, granularity: str, length: int = 130) -> list[bool]:
        inputs = [llama.input(random_tokens(length))]
        state = llama.program.prefill(inputs, Granularity.parse(granularity))
        answers = []
        while not state.is_done:
            answers.append(state.run_slice())
        return answers

    def test_whole_is_never_left(self, llama: Runner) -> None:
        assert not any(self.answers(llama, "whole"))

    def test_tile_is_left_everywhere_but_at_the_end(self, llama: Runner) -> None:
        *before, last = self.answers(llama, "tile")
        assert all(before) and not last

    @pytest.mark.parametrize(("granularity", "count"), [("layer", 2), ("op", 2 * 3 + 1)])
    def test_layer_and_op_are_left_after_each(
        self, llama: Runner, granularity: str, count: int
    ) -> None:
        assert sum(self.answers(llama, granularity)) == count

    @pytest.mark.parametrize(("size", "count"), [(64, 2), (130, 0), (129, 1), (1000, 0), (10, 12)])
    def test_chunk_is_left_between_chunks(self, llama: Runner, size: int, count: int) -> None:
        assert sum(self.answers(llama, f"chunk:{size}")) == count

    def test_decode_step_is_left_after_each_slice_but_the_last(self, llama: Runner) -> None:
        llama.prefill(random_tokens(10), WHOLE)
        state = llama.program.decode([llama.input([1], 10)])
        answers = []
        while not state.is_done:
            answers.append(state.run_slice())
        assert answers == [True] * 3 + [False]  # each layer, then the logits

    def test_decode_step_of_many_keys_is_left_within_its_layers(self, llama: Runner) -> None:
        for sequence in (0, 1):
            llama.prefill(random_tokens(300), WHOLE, sequence=sequence)
        inputs = [llama.input([1], 300, sequence) for sequence in (0, 1)]
        state = llama.program.decode(inputs)
        answers = []
        while not state.is_done:
            answers.append(state.run_slice())
        assert answers == [True] * 4 * 3 + [False]  # attention of each sequence is a slice
        alone = [llama.decode(1, 300, sequence) for sequence in (0, 1)]
        assert torch.equal(state.logits, torch.stack(alone))


class TestSeveralSlicesInACall:
    """run_slice with an interrupt: the native kernels go on, torch's operators do not."""

    @pytest.fixture
    def interrupt(self) -> Interrupt:
        interrupt = Interrupt(MonotonicClock())
        interrupt.begin_stretch()
        return interrupt

    def calls(self, runner: Runner, interrupt: Interrupt | None, granularity: str) -> list[bool]:
        """What run_slice answers, call by call, for a prompt of four tiles."""
        inputs = [runner.input(random_tokens(256))]
        state = runner.program.prefill(inputs, Granularity.parse(granularity))
        answers = []
        while not state.is_done:
            answers.append(state.run_slice(interrupt))
        return answers

    @pytest.mark.parametrize("granularity", ["tile", "op", "layer", "whole"])
    def test_only_another_operator_ends_a_call(
        self, runner: Runner, kernels: str, interrupt: Interrupt, granularity: str
    ) -> None:
        one_by_one = self.calls(runner, None, granularity)
        together = self.calls(runner, interrupt, granularity)
        if kernels == "torch":
            assert together == one_by_one
            return
        # two layers of QKV by tiles and two more operators, by tiles too or over the whole prompt;
        # then QKV of the last layer, and the head
        a_layer = 4 + 1 + 1 if granularity == "op" else 4 + 4 + 4
        assert len(together) == 2 * a_layer + 4 + 1 < len(one_by_one)
        num_boundaries = len(together) - 1 if granularity == "tile" else sum(one_by_one)
        assert sum(together) == num_boundaries
        assert len(together) + interrupt.num_more_slices == len(one_by_one)

    def test_raised_it_is_one_slice_a_call_where_the_task_may_be_left(
        self, runner: Runner, interrupt: Interrupt
    ) -> None:
        interrupt.raise_now()
        assert self.calls(runner, interrupt, "tile") == self.calls(runner, None, "tile")

    def test_raised_a_call_runs_on_to_where_the_task_may_be_left(
        self, runner: Runner, interrupt: Interrupt
    ) -> None:
        undisturbed = self.calls(runner, interrupt, "layer")
        interrupt.raise_now()
        assert self.calls(runner, interrupt, "layer") == undisturbed

    @pytest.mark.parametrize("granularity", ["tile", "op", "chunk:50"])
    def test_the_bits_are_those_of_one_by_one(
        self, runner: Runner, interrupt: Interrupt, granularity: str
    ) -> None:
        tokens = random_tokens(300)
        expected = runner.prefill(tokens, WHOLE)
        state = runner.program.prefill([runner.input(tokens)], Granularity.parse(granularity))
        while not state.is_done:
            state.run_slice(interrupt)
        assert torch.equal(state.logits[0], expected)


class TestRemaining:
    """remaining_s of a pass: what it still has to run, as the cost function sees it."""

    @staticmethod
    def cost(piece: Slice) -> float:
        # exact in binary, different for each group
        weight = {
            Group.QKV: 1,
            Group.ATTENTION: 2,
            Group.MLP: 4,
            Group.HEAD: 8,
            Group.LOGITS: 16,
            Group.LAYERS: 32,
        }[piece.group]
        return weight + piece.num_rows / 2 + piece.num_keys / 4

    @pytest.mark.parametrize("granularity", ["whole", *GRANULARITIES])
    def test_remaining_is_the_sum_of_the_slices_still_to_run(
        self, llama: Runner, granularity: str
    ) -> None:
        inputs = [llama.input(random_tokens(140))]
        state = llama.program.prefill(inputs, Granularity.parse(granularity))
        expected, costs = [], []
        while not state.is_done:
            expected.append(state.remaining_s(self.cost))
            costs.append(self.cost(state.next_slice))
            state.run_slice()
        assert expected == [sum(costs[i:]) for i in range(len(costs))]
        assert expected == sorted(set(expected), reverse=True)

    @pytest.mark.parametrize("granularity", ["tile", "chunk:64"])
    def test_asking_again_in_a_pass_costs_nothing(self, llama: Runner, granularity: str) -> None:
        asked: list[Slice] = []

        def cost(piece: Slice) -> float:
            asked.append(piece)
            return self.cost(piece)

        inputs = [llama.input(random_tokens(140))]
        state = llama.program.prefill(inputs, Granularity.parse(granularity))
        state.remaining_s(cost)
        asked.clear()
        state.run_slice()
        state.remaining_s(cost)
        assert len(asked) == 1

    def test_a_cost_that_has_changed_is_asked_anew(self, llama: Runner) -> None:
        speed = 1.0

        def cost(piece: Slice) -> float:
            return speed * self.cost(piece)

        state = llama.program.prefill([llama.input(random_tokens(140))], TILE)
        before = state.remaining_s(cost)
        speed = 2.0
        assert state.remaining_s(cost) == 2 * before
        assert state.remaining_s(self.cost) == before

    def test_decode_step_counts_its_slices_too(self, llama: Runner) -> None:
        llama.prefill(random_tokens(10), WHOLE)
        state = llama.program.decode([llama.input([1], 10)])
        expected, total = state.remaining_s(self.cost), 0.0
        while not state.is_done:
            total += self.cost(state.next_slice)
            state.run_slice()
        assert expected == total


class TestLiveBytes:
    """What a parked pass holds beside its KV blocks."""

    @pytest.mark.parametrize(("granularity", "q_rows"), [("tile", 64), ("op", 300), ("layer", 64)])
    def test_a_parked_pass_holds_its_residual_and_the_queries_of_one_tile(
        self, llama: Runner, granularity: str, q_rows: int
    ) -> None:
        spec = llama.model.spec
        state = llama.program.prefill(
            [llama.input(random_tokens(300))], Granularity.parse(granularity)
        )
        residual, queries = 300 * spec.hidden_size * 4, q_rows * spec.q_size * 4
        positions_and_slots = 300 * 2 * 8
        while not state.is_done:
            tensors = [v for v in vars(state).values() if isinstance(v, torch.Tensor)]
            held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            assert held <= residual + queries + positions_and_slots
            assert residual + queries <= state.live_bytes <= held
            state.run_slice()
