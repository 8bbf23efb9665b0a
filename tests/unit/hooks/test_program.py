"""Hooked models of many architectures: parked anywhere, the same bits."""

from __future__ import annotations

import random

import pytest
import torch

from flowprefill.granularity import Granularity
from flowprefill.hooks.causal_lm import cache_bytes
from flowprefill.hooks.sequences import Sequences
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import ProgramState, SequenceInput
from tests.unit.hooks.tiny import (
    ARCHITECTURES,
    make_program,
    prompt,
    prompt_input,
    run_to_end,
    table,
)

WHOLE = Granularity("whole")
GRANULARITIES = ("whole", "chunk:20", "layer", "op", "tile")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_the_model_itself(name: str) -> None:
    program, tokens, at = make_program(name), prompt(40), table()
    with torch.inference_mode():
        expected = program.lm.model(input_ids=torch.tensor([[*tokens, 5]])).logits[0, -2:]
    prefilled = run_to_end(program.prefill([prompt_input(tokens, at)], Granularity("op")))
    decoded = run_to_end(program.decode([SequenceInput([5], 40, at)]))
    torch.testing.assert_close(prefilled[0], expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(decoded[0], expected[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parked_anywhere_the_same_bits(name: str, granularity: str) -> None:
    """Three prompts and their decode steps in random stretches, against each run alone."""
    program, draw = make_program(name), random.Random(1)
    prompts = [prompt(n, seed=n) for n in (70, 33, 1)]
    alone = []
    for tokens in prompts:
        at = table()
        state = program.prefill([prompt_input(tokens, at)], Granularity.parse(granularity))
        alone.append([run_to_end(state)])
        for i in range(2):
            alone[-1].append(run_to_end(program.decode([SequenceInput([7], len(tokens) + i, at)])))
    tables = [table(i) for i in range(3)]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    states: dict[int, ProgramState] = {}
    while states or any(len(one) < 3 for one in found):
        i = draw.choice([i for i in range(3) if len(found[i]) < 3])
        if i not in states:
            length, num_done = len(prompts[i]), len(found[i])
            one = [SequenceInput([7], length + num_done - 1, tables[i])]
            states[i] = (
                program.decode(one)
                if num_done
                else program.prefill(
                    [prompt_input(prompts[i], tables[i])], Granularity.parse(granularity)
                )
            )
        for _ in range(draw.randint(1, 4)):
            if not states[i].is_done:
                states[i].run_slice()
        if states[i].is_done:
            found[i].append(states.pop(i).logits)
    for one, other in zip(alone, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def boundaries_left(name: str, granularity: str, num_tokens: int = 70) -> int:
    program = make_program(name)
    state = program.prefill(
        [prompt_input(prompt(num_tokens), table())], Granularity.parse(granularity)
    )
    count = 0
    while not state.is_done:
        count += state.run_slice()
    return count


def test_granularity_says_where_a_prefill_may_be_left() -> None:
    counts = [boundaries_left("Llama", g) for g in ("whole", "chunk:20", "layer", "op", "tile")]
    assert counts == [0, 3, 3, 6, 3 * 6 + 2]
    assert boundaries_left("Mamba", "chunk:20") == 0, "recurrent prompts come in one piece"
    assert boundaries_left("Mamba", "tile") == 3


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe", "GPTNeoX", "Gemma3", "Mamba"])
def test_sequences_of_any_lengths_decode_together(name: str) -> None:
    program, lengths = make_program(name), (50, 3, 17)
    assert program.lm.is_batched == (name not in ("Gemma3", "Mamba"))
    tables = [table(i) for i in range(3)]
    for n, at in zip(lengths, tables, strict=True):
        run_to_end(program.prefill([prompt_input(prompt(n, seed=n), at)], WHOLE))
    together = [
        run_to_end(
            program.decode(
                [SequenceInput([9], n + i, tables[row]) for row, n in enumerate(lengths)]
            )
        )
        for i in range(2)
    ]
    for row, n in enumerate(lengths):
        at = table(5)
        run_to_end(program.prefill([prompt_input(prompt(n, seed=n), at)], WHOLE))
        for i in range(2):
            alone = run_to_end(program.decode([SequenceInput([9], n + i, at)]))
            torch.testing.assert_close(together[i][row], alone[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("lengths", "num_passes"), [((3, 200, 3, 3), 2), ((40, 50, 60), 1), ((9,), 1), ((), 0)]
)
def test_sequences_of_like_lengths_decode_together(
    lengths: tuple[int, ...], num_passes: int
) -> None:
    """Keys that are computed are at most twice those that are there, and counted as such."""
    program = make_program("Llama")
    inputs = []
    for row, n in enumerate(lengths):
        at = table(row)
        run_to_end(program.prefill([prompt_input(prompt(n, seed=row), at)], WHOLE))
        inputs.append(SequenceInput([9], n, at))
    step = program.decode(inputs)
    sizes = [
        (len(work.members) * (max(s.num_tokens for s in work.members) + 1), work.slice().num_keys)
        for work in step._works
    ]
    assert len(sizes) == num_passes
    assert sum(size for size, _ in sizes) <= 2 * sum(n + 1 for n in lengths)
    assert all(size == counted for size, counted in sizes)
    if lengths:
        together = run_to_end(step)
    for row, n in enumerate(lengths):
        at = table(5)
        run_to_end(program.prefill([prompt_input(prompt(n, seed=row), at)], WHOLE))
        alone = run_to_end(program.decode([SequenceInput([9], n, at)]))
        torch.testing.assert_close(together[row], alone[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_slices", range(0, 16, 3))
@pytest.mark.parametrize("name", ["Llama", "Gemma3", "Mamba"])
def test_a_dropped_decode_step_is_gone_on_with_by_the_members_left(
    name: str, num_slices: int
) -> None:
    program = make_program(name)
    lengths = (20, 9)

    def start() -> list[SequenceInput]:
        tables = [table(i) for i in range(2)]
        for n, at in zip(lengths, tables, strict=True):
            run_to_end(program.prefill([prompt_input(prompt(n, seed=n), at)], WHOLE))
        return [SequenceInput([9], n, at) for n, at in zip(lengths, tables, strict=True)]

    expected = run_to_end(program.decode(start()))
    inputs = start()
    step = program.decode(inputs)
    for _ in range(num_slices):
        if not step.is_done:
            step.run_slice()
    del step
    left = inputs.pop(0)
    again = run_to_end(program.decode(inputs))
    assert num_slices == 0 or torch.equal(again[0], expected[1])
    assert program.sequences.of(left.table).num_tokens in (20, 21)
    following = [SequenceInput([4], 10, inputs[0].table)]
    assert run_to_end(program.decode(following)).isfinite().all()


def test_caches_live_as_long_as_their_blocks() -> None:
    program = make_program("Llama")
    ended, evicted = table(0), table(1)
    for at in (ended, evicted):
        run_to_end(program.prefill([prompt_input(prompt(40), at)], WHOLE))
    assert len(program.sequences) == 2
    del at, ended
    assert len(program.sequences) == 1, "the request has ended"
    sequence = program.sequences.of(evicted)
    assert sequence.cache is not None
    run_to_end(program.prefill([prompt_input(prompt(40), table(1))], WHOLE))
    assert sequence.cache is None, "its blocks were given to somebody else"


def test_a_parked_prefill_says_what_it_holds() -> None:
    program = make_program("Llama")
    state = program.prefill([prompt_input(prompt(200), table())], Granularity("op"))
    assert state.live_bytes == 0
    state.run_slice()
    hidden = 200 * 32 * 4
    assert hidden <= state.live_bytes <= 8 * hidden
    run_to_end(state)
    assert state.live_bytes == 0


def test_what_is_left_falls_to_nothing() -> None:
    program = make_program("Llama")
    state = program.prefill([prompt_input(prompt(70), table())], Granularity("tile"))
    left = []
    while not state.is_done:
        left.append(state.remaining_s(lambda piece: float(piece.num_rows)))
        state.run_slice()
    assert left == sorted(left, reverse=True) and left[0] == 70 * program.lm.num_slices
    assert state.remaining_s(lambda piece: 1.0) == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_cache_never_holds_more_than_what_is_counted_for_it(name: str) -> None:
    program, at = make_program(name), table()
    lm = program.lm
    for length in (1, 40, 200):
        at = table()
        run_to_end(program.prefill([prompt_input(prompt(length), at)], Granularity("tile")))
        held = cache_bytes(program.sequences.of(at).cache)
        assert 0 < held <= lm.token_bytes * length + lm.sequence_bytes


def test_blocks_are_known_without_asking_the_device() -> None:
    nowhere = torch.device("meta")  # as a CUDA device would be waited for
    sequences, at = Sequences(), BlockTable([3, 4], 16, nowhere)
    first = sequences.of(at)
    first.num_tokens = 20
    at.extend([7])
    assert sequences.of(at) is first and first.blocks == {3, 4, 7}
    sequences.of(BlockTable([7], 16, nowhere))
    assert first.num_tokens == 0, "one of its blocks was given to somebody else"
