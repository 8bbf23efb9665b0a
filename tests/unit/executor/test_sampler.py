import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flowprefill.executor.sampler import Sampler, SamplingState
from flowprefill.request import FinishReason
from flowprefill.sampling_params import SamplingParams

LOGITS = [2.0, 1.5, -1.0, 0.0, 1.4, -3.0, 0.5, 1.0, -0.5, 0.25]
VOCAB = len(LOGITS)
EOS = 7
NUM_DRAWS = 2_000


def make_state(prompt=(), output=(), eos=(EOS,), seed=0, **params):
    state = SamplingState(SamplingParams(**params), prompt, eos, seed)
    state.output_token_ids += output
    return state


def sample(state, logits=LOGITS):
    return Sampler(len(logits)).sample(torch.tensor([logits]), [state])[0]


def draw(state, num_tokens, logits=LOGITS):
    return [sample(state, logits).token_id for _ in range(num_tokens)]


def reference_probs(params, prompt=(), output=(), eos=(EOS,), logits=LOGITS):
    """The documented steps, one token at a time, in Python floats."""
    x = [value + params.logit_bias.get(i, 0.0) for i, value in enumerate(logits)]
    if len(output) < params.min_tokens:
        for i in (*eos, *params.stop_token_ids):
            x[i] = -math.inf
    for i in range(len(x)):
        if i in prompt or i in output:
            x[i] *= 1 / params.repetition_penalty if x[i] > 0 else params.repetition_penalty
        if i in output:
            x[i] -= params.frequency_penalty * output.count(i) + params.presence_penalty
    ranked = sorted(range(len(x)), key=lambda i: (-x[i], i))
    weight = {i: math.exp((x[i] - max(x)) / params.temperature) for i in ranked}
    ranked = ranked[: params.top_k or None]
    total, mass, nucleus = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if mass < params.top_p * total:
            nucleus.append(i)
        mass += weight[i]
    kept = [i for i in nucleus if weight[i] >= params.min_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(x))]


def chi_square_excess(tokens, probs):
    """Standard deviations by which the statistic exceeds its mean; inf for an impossible token."""
    counts = Counter(tokens)
    if any(probs[token] == 0 for token in counts):
        return math.inf
    likely = [i for i, p in enumerate(probs) if p > 0]
    expected = {i: probs[i] * len(tokens) for i in likely}
    statistic = sum((counts[i] - expected[i]) ** 2 / expected[i] for i in likely)
    freedom = len(likely) - 1
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_k": 1_000},
        {"top_p": 0.6},
        {"top_p": 0.95},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.1, "temperature": 1.5},
        {"logit_bias": {5: 5.0, 0: -100.0}},
        {"min_tokens": 3},
        {"min_tokens": 3, "stop_token_ids": (0, 1)},
        {"min_tokens": 2, "stop_token_ids": (0, 1)},
        {"repetition_penalty": 2.0},
        {"repetition_penalty": 0.5},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -1.5},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.6},
    ],
)
def test_draws_follow_the_documented_distribution(params):
    prompt, output = [0, 2, 2, 9], [1, 1]
    state = make_state(prompt, output, seed=1, **params)
    tokens = draw(state, NUM_DRAWS)
    probs = reference_probs(SamplingParams(**params), prompt, output)
    assert chi_square_excess(tokens, probs) < 4.0


def test_the_distribution_test_can_tell_temperatures_apart():
    tokens = draw(make_state(temperature=1.2), NUM_DRAWS)
    assert chi_square_excess(tokens, reference_probs(SamplingParams())) > 4.0


@settings(
    deadline=None,
    derandomize=True,
    max_examples=200,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    logits=st.lists(st.integers(-6, 6), min_size=1, max_size=30),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.01, 10.0),
)
def test_no_token_outside_top_k_top_p_and_min_p_is_drawn(logits, top_k, top_p, min_p, temperature):
    logits = [float(value) for value in logits]
    asked = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "temperature": temperature}
    # A hair more generous, for sums in another order and weights in float32.
    generous = {**asked, "top_p": min(1.0, top_p + 1e-5), "min_p": min_p * (1 - 1e-5)}
    probs = reference_probs(SamplingParams(**generous), eos=(), logits=logits)
    assert all(probs[token] > 0 for token in draw(make_state(eos=(), **asked), 10, logits))


def test_temperature_zero_takes_the_most_likely_token_and_the_first_of_equals():
    assert sample(make_state(temperature=0.0)).token_id == 0
    assert sample(make_state(temperature=0.0), [1.0, 3.0, 3.0, 2.0]).token_id == 1


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_tightest_cut_equals_greedy(params):
    assert set(draw(make_state(**params), 50)) == {0}


def test_top_k_keeps_k_of_equal_logits():
    tokens = set(draw(make_state(eos=(), top_k=2), 200, [1.0] * 6))
    assert tokens == {0, 1}


def test_top_p_keeps_the_fewest_tokens_of_equal_logits():
    tokens = set(draw(make_state(eos=(), top_p=0.5), 200, [1.0] * 8))
    assert tokens == {0, 1, 2, 3}


def test_a_token_without_weight_is_never_drawn():
    logits = [-1e30, 0.0, -1e30, 0.0, -1e30]
    assert set(draw(make_state(eos=()), 200, logits)) == {1, 3}


def test_penalties_apply_to_greedy_choice():
    logits = [3.0, 2.9, 0.0]
    assert sample(make_state(temperature=0.0, presence_penalty=0.5), logits).token_id == 0
    penalized = make_state(output=[0], temperature=0.0, presence_penalty=0.5)
    assert sample(penalized, logits).token_id == 1


def test_only_repetition_looks_at_the_prompt():
    logits = [3.0, 2.9, 0.0]
    others = make_state([0], temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert sample(others, logits).token_id == 0
    assert sample(make_state([0], temperature=0.0, repetition_penalty=1.1), logits).token_id == 1


def test_penalties_count_every_token_appended_between_two_samples():
    state = make_state(temperature=0.0, frequency_penalty=0.5)
    chosen = []
    for _ in range(6):
        chosen.append(sample(state, [2.0, 1.75, 1.0]).token_id)
        state.output_token_ids.append(chosen[-1])
    # After each choice its logit falls by 0.5: 2.0, 1.75 | 1.5, 1.25 | 1.0 = 1.0: the first.
    assert chosen == [0, 1, 0, 1, 0, 2]


# End of the answer


def test_eos_cannot_be_chosen_before_min_tokens():
    certain_eos = [0.0] * VOCAB
    certain_eos[EOS] = 50.0
    state = make_state(temperature=0.0, min_tokens=3, max_tokens=10)
    reasons = []
    while not reasons or reasons[-1] is None:
        token_id = sample(state, certain_eos).token_id
        state.output_token_ids.append(token_id)
        reasons.append(state.finish_reason(token_id))
    assert state.output_token_ids == [0, 0, 0, EOS]
    assert reasons[-1] is FinishReason.STOP


def test_eos_is_held_back_before_min_tokens_even_where_it_is_ignored():
    certain_eos = [0.0] * VOCAB
    certain_eos[EOS] = 50.0
    state = make_state(temperature=0.0, min_tokens=1, ignore_eos=True)
    assert sample(state, certain_eos).token_id != EOS
    state.output_token_ids.append(0)
    assert sample(state, certain_eos).token_id == EOS


def test_a_stop_token_within_min_tokens_does_not_stop():
    state = make_state(output=[EOS, EOS], min_tokens=2)
    assert state.finish_reason(EOS) is None
    state.output_token_ids.append(EOS)
    assert state.finish_reason(EOS) is FinishReason.STOP


def test_any_of_several_eos_tokens_stops():
    assert make_state(output=[3], eos=(7, 3)).finish_reason(3) is FinishReason.STOP


def test_ignored_eos_does_not_stop():
    assert make_state(output=[EOS], ignore_eos=True).finish_reason(EOS) is None


def test_a_stop_token_stops_even_where_eos_is_ignored():
    state = make_state(output=[4], ignore_eos=True, stop_token_ids=(4,))
    assert state.finish_reason(4) is FinishReason.STOP


def test_a_stop_token_id_that_is_eos_stops_even_where_eos_is_ignored():
    state = make_state(output=[EOS], ignore_eos=True, stop_token_ids=(EOS,))
    assert state.finish_reason(EOS) is FinishReason.STOP


def test_the_last_allowed_token_ends_with_length():
    assert make_state(output=[1], max_tokens=2).finish_reason(1) is None
    assert make_state(output=[1, 1], max_tokens=2).finish_reason(1) is FinishReason.LENGTH


def test_eos_as_last_allowed_token_ends_with_stop():
    assert make_state(output=[1, EOS], max_tokens=2).finish_reason(EOS) is FinishReason.STOP


def test_min_tokens_equal_to_max_tokens_ends_with_length():
    state = make_state(output=[1, 1], min_tokens=2, max_tokens=2)
    assert state.finish_reason(1) is FinishReason.LENGTH


# Log-probabilities


def log_softmax(logits):
    return torch.log_softmax(torch.tensor(logits, dtype=torch.float64), dim=0).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_logprobs_are_the_models_before_any_step(temperature):
    state = make_state(
        [0],
        [1],
        temperature=temperature,
        top_k=4,
        repetition_penalty=2.0,
        logit_bias={0: -3.0},
        logprobs=3,
    )
    sampled = sample(state)
    expected = log_softmax(LOGITS)
    assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=1e-6)
    for top in sampled.top_logprobs:
        assert top.logprob == pytest.approx(expected[top.token_id], abs=1e-6)


def test_the_chosen_token_comes_first_then_the_most_likely_others():
    # Token 8 is forced; the model ranks it eighth.
    sampled = sample(make_state(temperature=0.0, logit_bias={8: 100.0}, logprobs=3))
    assert [(top.token_id, top.rank) for top in sampled.top_logprobs] == [
        (8, 8),
        (0, 1),
        (1, 2),
        (4, 3),
    ]


def test_a_chosen_token_among_the_most_likely_is_listed_once():
    sampled = sample(make_state(temperature=0.0, logprobs=2))
    assert [(top.token_id, top.rank) for top in sampled.top_logprobs] == [(0, 1), (1, 2)]


def test_equal_logits_have_distinct_ranks():
    state = make_state(temperature=0.0, eos=(), logit_bias={2: 1.0}, logprobs=3)
    sampled = sample(state, [0.0] * 4)
    assert [(t.token_id, t.rank) for t in sampled.top_logprobs] == [(2, 3), (0, 1), (1, 2)]


def test_logprobs_zero_reports_the_chosen_token_alone():
    sampled = sample(make_state(logprobs=0))
    assert [top.token_id for top in sampled.top_logprobs] == [sampled.token_id]


def test_logprobs_are_not_listed_unless_asked():
    assert sample(make_state()).top_logprobs == []


def test_logprobs_of_the_whole_vocabulary_sum_to_one():
    sampled = sample(make_state(logprobs=20))
    assert len(sampled.top_logprobs) == VOCAB
    assert sum(math.exp(t.logprob) for t in sampled.top_logprobs) == pytest.approx(1.0, abs=1e-6)
    assert sorted(t.rank for t in sampled.top_logprobs) == list(range(1, VOCAB + 1))


def test_logprobs_agree_with_torch_on_a_large_vocabulary():
    logits = (4 * torch.randn(49_152, generator=torch.Generator().manual_seed(0))).tolist()
    sampled = sample(make_state(temperature=0.0, logprobs=20), logits)
    values, ids = torch.tensor(log_softmax(logits)).topk(20)
    assert [t.token_id for t in sampled.top_logprobs] == ids.tolist()
    assert [t.logprob for t in sampled.top_logprobs] == pytest.approx(values.tolist(), abs=1e-5)


# Seeds and batches


def test_the_same_seed_gives_the_same_draws():
    assert draw(make_state(seed=5), 50) == draw(make_state(seed=5), 50)


def test_different_seeds_give_different_draws():
    draws = {tuple(draw(make_state(seed=seed), 20)) for seed in (-5, 0, 1, 5, 2**63 - 1)}
    assert len(draws) == 5


def test_the_requests_own_seed_wins_over_the_engines():
    own = draw(SamplingState(SamplingParams(seed=9), (), (), seed=1), 50)
    assert own == draw(SamplingState(SamplingParams(seed=9), (), (), seed=2), 50)
    assert own == draw(make_state(seed=9), 50)


ROW_PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {},
    {"top_p": 0.9, "logprobs": 2},
    {"top_k": 20, "temperature": 0.7},
    {"min_p": 0.05, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
]


def run_rows(rows, logits, num_steps):
    """Each row's outcomes when exactly `rows` share every step."""
    states = [make_state([1, 2, 3], seed=row, **ROW_PARAMS[row]) for row in rows]
    outcomes = {row: [] for row in rows}
    sampler = Sampler(logits.shape[-1])
    for step in range(num_steps):
        for row, state, sampled in zip(
            rows, states, sampler.sample(logits[step][rows], states), strict=True
        ):
            outcomes[row].append(sampled)
            state.output_token_ids.append(sampled.token_id)
    return outcomes


@settings(
    deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
@given(st.permutations(range(len(ROW_PARAMS))), st.integers(1, len(ROW_PARAMS)))
def test_a_rows_outcome_is_bit_equal_whoever_shares_its_step(order, num_rows):
    # 1,003 is no multiple of a vector width: rows of a batch start at odd addresses.
    logits = 3 * torch.randn(3, len(ROW_PARAMS), 1_003, generator=torch.Generator().manual_seed(3))
    together = run_rows(order[:num_rows], logits, 3)
    for row in order[:num_rows]:
        assert together[row] == run_rows([row], logits, 3)[row]


def test_layout_and_dtype_of_the_logits_do_not_matter():
    logits = torch.randn(64, 3, generator=torch.Generator().manual_seed(0)).bfloat16().T
    outcomes = [
        Sampler(64).sample(variant, [make_state(seed=i, logprobs=2) for i in range(3)])
        for variant in (logits, logits.float(), logits.contiguous(), logits.double())
    ]
    assert all(outcome == outcomes[0] for outcome in outcomes)


def test_logits_are_left_as_they_were():
    logits = torch.tensor([LOGITS])
    params = {"logit_bias": {1: 5.0}, "repetition_penalty": 2.0, "min_tokens": 1, "top_p": 0.5}
    Sampler(VOCAB).sample(logits, [make_state([0], **params)])
    assert logits.tolist() == torch.tensor([LOGITS]).tolist()


def test_no_rows_give_no_tokens():
    assert Sampler(VOCAB).sample(torch.empty(0, VOCAB), []) == []


# Rows that cannot be served


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_non_finite_logit_fails_its_row_alone(bad, temperature):
    logits = torch.tensor([LOGITS] * 3)
    logits[1, 4] = bad
    states = [make_state(seed=i, temperature=temperature) for i in range(3)]
    first, failed, last = Sampler(VOCAB).sample(logits, states)
    assert failed.token_id == -1
    assert "not finite" in failed.error
    assert first == sample(make_state(seed=0, temperature=temperature))
    assert last == sample(make_state(seed=2, temperature=temperature))


def test_a_vocabulary_of_stop_tokens_fails_the_row_before_min_tokens():
    state = make_state(min_tokens=1, stop_token_ids=tuple(range(VOCAB)))
    assert "no token" in sample(state).error


def test_penalties_that_overflow_fail_the_row():
    state = make_state([0], temperature=0.0, repetition_penalty=0.01)
    assert "no token" in sample(state, [3e38, 0.0]).error


@pytest.mark.parametrize("temperature", [0.01, 100.0])
def test_huge_finite_logits_are_sampled(temperature):
    state = make_state(eos=(), temperature=temperature, top_p=0.9, logprobs=2)
    sampled = sample(state, [3e38, -3e38, 1.0])
    assert sampled.token_id == 0
    assert sampled.error is None
    assert sampled.logprob == 0.0


def test_numpy_is_not_asked_for_its_global_random_state():
    before = np.random.get_state()[1].tolist()
    draw(make_state(), 5)
    assert np.random.get_state()[1].tolist() == before
