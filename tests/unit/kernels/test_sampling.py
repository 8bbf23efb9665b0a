"""Choosing tokens by the kernel against the sampler's own way, row by row."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.triton_kernels import (  # first: it skips where triton is not installed
    DEVICE,
    quick_interpreter,
)

# isort: split

from flowprefill.executor.device_choice import Draw, choose_by_kernel
from flowprefill.executor.sampler import Sampled, Sampler, SamplingState
from flowprefill.kernels import sampling
from flowprefill.sampling_params import SamplingParams

__all__ = ["quick_interpreter"]

ROWS = 4
BLOCK = 128
PARAMS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 50.0},
    "cold": {"temperature": 0.25},
    "top_k": {"top_k": 7},
    "top_k 1": {"top_k": 1},
    "top_k of all": {"top_k": 500},
    "top_p": {"top_p": 0.8},
    "low top_p": {"top_p": 0.05},
    "high top_p": {"top_p": 0.999},
    "min_p": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
}

ENDS = ("greedy", "cold", "top_k", "top_p", "all three")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, quick_interpreter: None) -> None:
    """A row is several blocks, or part of one."""
    monkeypatch.setattr(sampling, "BLOCK", BLOCK)


def make_logits(vocab: int, ties: bool, rows: int = ROWS) -> Tensor:
    """ties: of few values, among them 0 and -0"""
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab))
    return logits.round() if ties else logits


def make_states(rows: int = ROWS, **params: float) -> list[SamplingState]:
    return [SamplingState(SamplingParams(**params), (), (), seed) for seed in range(rows)]


def on_host(logits: Tensor, states: list[SamplingState]) -> list[Sampled]:
    return Sampler(logits.shape[1]).sample(logits, states)


def by_kernel(logits: Tensor, states: list[SamplingState]) -> list[Sampled]:
    return Sampler(logits.shape[1], choose_by_kernel).sample(logits.to(DEVICE), states)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize(("vocab", "ties"), [(300, False), (33, True)])
def test_the_same_tokens_are_drawn_as_on_the_host(
    params: dict[str, float], vocab: int, ties: bool
) -> None:
    logits = make_logits(vocab, ties)
    expected = on_host(logits, make_states(**params))
    for ours, theirs in zip(by_kernel(logits, make_states(**params)), expected, strict=True):
        assert ours.token_id == theirs.token_id and not ours.error
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)


@pytest.mark.parametrize("uniform", [0.0, 1.0])
@pytest.mark.parametrize("params", [PARAMS[n] for n in ENDS], ids=ENDS)
def test_the_ends_of_the_distribution_are_tokens_that_it_keeps(
    uniform: float, params: dict[str, float]
) -> None:
    logits = make_logits(33, ties=True)
    asked = SamplingParams(**params)
    draw = Draw(asked.temperature, asked.top_k, asked.top_p, asked.min_p, uniform)
    kept = [kept_tokens(row, draw) for row in logits.numpy()]
    for chosen, tokens in zip(
        choose_by_kernel(logits.to(DEVICE), [draw] * ROWS), kept, strict=True
    ):
        # near 1 rounding decides which of the last it is
        assert chosen.token_id in (tokens if uniform else tokens[:1])


def kept_tokens(row: np.ndarray, draw: Draw) -> list[int]:
    """By the documented steps, in Python floats; ascending."""
    ranked = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if draw.temperature == 0:
        return ranked[:1]
    weight = [math.exp((float(x) - float(row.max())) / draw.temperature) for x in row]
    ranked = ranked[: draw.top_k or None]
    total, mass, kept = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        is_in = draw.top_p == 1 or mass < draw.top_p * total
        if is_in and weight[i] >= max(draw.min_p, 1e-40):
            kept.append(i)
        mass += weight[i]
    return sorted(kept)


def test_a_row_s_outcome_depends_on_no_other() -> None:
    logits = make_logits(300, ties=False)
    draws = [Draw(0.9, 40, 0.95, 0.01, random.Random(i).random()) for i in range(ROWS)]
    together = choose_by_kernel(logits.to(DEVICE), draws)
    for row in range(ROWS):
        alone = choose_by_kernel(logits[row : row + 1].to(DEVICE), draws[row : row + 1])
        assert alone == together[row : row + 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = make_logits(33, ties=False, rows=3)
    logits[1, 20] = bad
    with np.errstate(invalid="ignore"):  # of the interpreter
        first, failed, last = by_kernel(logits, make_states(3, temperature=1.0))
    assert failed.error and failed.token_id == -1
    good = on_host(logits[[0, 2]], [make_states(3)[0], make_states(3)[2]])
    assert [first.token_id, last.token_id] == [one.token_id for one in good]


def test_large_logits_do_not_overflow() -> None:
    logits = 1e30 * make_logits(33, ties=False)
    for params in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 5}):
        states = make_states(**params)
        ours = [one.token_id for one in by_kernel(logits, states)]
        assert ours == logits.argmax(1).tolist()


def test_zeros_of_either_sign_are_equal_and_the_first_is_kept() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0], [-1.0, 0.0, -0.0, 0.0]])
    draws = [Draw(1.0, top_k=1, uniform=0.5)] * 2
    assert [one.token_id for one in choose_by_kernel(logits.to(DEVICE), draws)] == [1, 1]


class TestSharing:
    """Rows that need more than a draw are chosen on the host, beside the others."""

    def test_each_row_is_chosen_by_what_it_asks_for(self) -> None:
        logits = make_logits(33, ties=False, rows=6)

        def states() -> list[SamplingState]:
            plain = make_states(6, temperature=0.8)
            penalized = make_states(6, temperature=0.8, presence_penalty=1.5)
            with_logprobs = make_states(6, temperature=0.8, logprobs=2)
            mixed = [(plain, penalized, with_logprobs)[i % 3][i] for i in range(6)]
            for state in mixed:
                state.output_token_ids += [3, 4]
            return mixed

        asked: list[int] = []

        def choose(logits: Tensor, draws: list[Draw]) -> list:
            asked.append(len(draws))
            return choose_by_kernel(logits, draws)

        found = Sampler(33, choose).sample(logits.to(DEVICE), states())
        assert asked == [2]
        expected = on_host(logits, states())
        assert [one.token_id for one in found] == [one.token_id for one in expected]
        assert [one.top_logprobs for one in found] == [one.top_logprobs for one in expected]

    def test_a_held_back_stop_token_is_not_left_to_the_kernel(self) -> None:
        logits = torch.zeros(1, 5)
        logits[0, 2] = 9.0
        params = SamplingParams(temperature=0.0, min_tokens=1)
        state = SamplingState(params, (), eos_token_ids=(2,), seed=0)
        sampler = Sampler(5, choose_by_kernel)
        assert sampler.sample(logits.to(DEVICE), [state])[0].token_id == 0
        state.output_token_ids.append(0)
        assert sampler.sample(logits.to(DEVICE), [state])[0].token_id == 2

    def test_without_rows_nothing_is_launched(self) -> None:
        assert Sampler(5, choose_by_kernel).sample(torch.empty(0, 5, device=DEVICE), []) == []


def test_blocks_as_wide_as_on_a_card_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = make_logits(300, ties=True)
    params = PARAMS["all three"]
    narrow = by_kernel(logits, make_states(**params))
    monkeypatch.undo()
    assert sampling.BLOCK > BLOCK
    wide = by_kernel(logits, make_states(**params))
    assert [one.token_id for one in wide] == [one.token_id for one in narrow]
