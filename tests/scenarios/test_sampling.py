"""Sampling parameters at the ends of what is taken."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.executor.sampler import Sampler, SamplingState
from flowprefill.sampling_params import SamplingParams


def a_number(low: float, high: float) -> st.SearchStrategy[float]:
    """Any in the range, its ends often."""
    return st.one_of(st.sampled_from((low, high)), st.floats(low, high))


@settings(deadline=None, max_examples=300)
@given(
    temperature=a_number(0, 100),
    top_p=a_number(1e-30, 1),
    top_k=st.integers(-1, 40),
    min_p=a_number(0, 1),
    repetition_penalty=a_number(0.01, 100),
    penalties=st.tuples(a_number(-2, 2), a_number(-2, 2)),
    bias=a_number(-100, 100),
    logits=st.lists(st.floats(-1e5, 1e5, width=32), min_size=8, max_size=8),
)
def test_whatever_sampling_is_taken_a_token_can_be_drawn(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float,
    penalties: tuple[float, float],
    bias: float,
    logits: list[float],
) -> None:
    """Row 19, sglang#24874: a value passes the check and still gives inf or NaN."""
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=penalties[0],
        frequency_penalty=penalties[1],
        logit_bias={0: bias},
    )
    state = SamplingState(params, [0, 1, 2], eos_token_ids=(), seed=0)
    for _ in range(3):
        (sampled,) = Sampler(len(logits)).sample(torch.tensor([logits]), [state])
        assert sampled.error is None
        assert 0 <= sampled.token_id < len(logits)
        state.output_token_ids.append(sampled.token_id)
