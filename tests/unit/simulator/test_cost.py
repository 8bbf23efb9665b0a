"""Cost models: boundaries, what chunks cost, and predictions that are wrong on purpose."""

from __future__ import annotations

import itertools

import pytest

from flowprefill.granularity import Granularity
from flowprefill.simulator.cost import LayerTimeline, NoisyPredictor, PassTimeline, Stretch
from flowprefill.simulator.data_sheets import A800, EFFICIENCY, LLAMA_3_1_8B
from flowprefill.simulator.roofline import RooflineCost, num_kv_tokens

MAX_SLICE_S = 0.004
GRANULARITIES = ["whole", "chunk:256", "chunk:2048", "layer", "op", "tile"]
LENGTHS = [1, 100, 700, 8192, 50_000]
WEIGHT_BYTES = 16e9


def cost(granularity: str = "op") -> RooflineCost:
    return RooflineCost(Granularity.parse(granularity), MAX_SLICE_S)


def boundaries_s(granularity: str, num_tokens: int, num_cached_tokens: int = 0) -> list[float]:
    """All boundaries of a prompt, found by asking again behind each."""
    timeline = cost(granularity).timeline(
        [(num_tokens, num_cached_tokens)], Granularity.parse(granularity)
    )
    found = [timeline.next_boundary_s(1e-7)]
    while found[-1] < timeline.total_s:
        found.append(timeline.next_boundary_s(found[-1] + 1e-7))
    return found


def test_layers_have_boundaries_behind_each_stretch_and_slice() -> None:
    layer = [Stretch(2.0, 2.0), Stretch(5.0, 1.2)]
    timeline = LayerTimeline(layer, 2, [Stretch(0.5, 0.5)])
    asked = {0.1: 2.0, 2.1: 3.2, 3.2: 3.2, 3.3: 4.4, 4.5: 5.0, 5.1: 7.0, 9.9: 10.0, 10.2: 10.5}
    assert timeline.total_s == 10.5
    for elapsed_s, boundary_s in asked.items():
        assert timeline.next_boundary_s(elapsed_s) == pytest.approx(boundary_s)


def test_passes_have_boundaries_at_their_ends() -> None:
    timeline = PassTimeline([1.0, 3.0, 3.5])
    assert [timeline.next_boundary_s(t) for t in (0.5, 1.0, 1.1, 3.5)] == [1.0, 1.0, 3.0, 3.5]


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_boundary_is_where_it_was_asked_for_or_later(granularity: str, num_tokens: int) -> None:
    kind = Granularity.parse(granularity)
    timeline = cost(granularity).timeline([(num_tokens, 0)], kind)
    before = 0.0
    for i in range(1, 2000):
        elapsed_s = timeline.total_s * i / 2000
        boundary_s = timeline.next_boundary_s(elapsed_s)
        assert elapsed_s - 1e-9 <= boundary_s <= timeline.total_s
        assert boundary_s >= before
        assert timeline.next_boundary_s(boundary_s) == pytest.approx(boundary_s, abs=1e-9)
        before = boundary_s
    assert timeline.next_boundary_s(timeline.total_s) == pytest.approx(timeline.total_s)


@pytest.mark.parametrize("num_tokens", [100, 8192])
def test_number_of_boundaries(num_tokens: int) -> None:
    num_layers = LLAMA_3_1_8B.num_layers
    assert len(boundaries_s("whole", num_tokens)) == 1
    assert len(boundaries_s("chunk:2048", num_tokens)) == -(-num_tokens // 2048)
    assert len(boundaries_s("layer", num_tokens)) == num_layers
    assert len(boundaries_s("op", num_tokens)) == 5 * (num_layers - 1) + 2


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tiles_bound_the_time_to_a_boundary_at_any_length(num_tokens: int) -> None:
    found = [0.0, *boundaries_s("tile", num_tokens)]
    longest_s = max(b - a for a, b in itertools.pairwise(found))
    assert longest_s <= MAX_SLICE_S * 1.001


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_tiles_cost_at_most_two_percent(num_tokens: int) -> None:
    assert cost("tile").prefill_s(num_tokens) <= 1.02 * cost("whole").prefill_s(num_tokens)


@pytest.mark.parametrize("granularity", ["layer", "op"])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_boundaries_alone_cost_nothing(granularity: str, num_tokens: int) -> None:
    whole_s = cost("whole").prefill_s(num_tokens)
    assert cost(granularity).prefill_s(num_tokens) == pytest.approx(whole_s)


@pytest.mark.parametrize("num_tokens", [8192, 50_000])
def test_smaller_chunks_cost_more(num_tokens: int) -> None:
    kinds = ["whole", *(f"chunk:{size}" for size in (4096, 2048, 1024, 512, 256))]
    times = [cost(kind).prefill_s(num_tokens) for kind in kinds]
    assert times == sorted(times)
    assert times[0] * 1.05 < times[-1]


def test_a_chunk_is_a_pass_over_its_tokens_that_attends_to_all_before() -> None:
    first_s, second_s, third_s = boundaries_s("chunk:2048", 3 * 2048)
    whole = Granularity("whole")
    third_alone_s = cost().timeline([(3 * 2048, 2 * 2048)], whole).total_s
    assert third_s - second_s == pytest.approx(third_alone_s)
    assert first_s < second_s - first_s < third_s - second_s


def test_chunks_are_cut_at_fixed_positions_behind_a_cached_prefix() -> None:
    found = boundaries_s("chunk:1000", 2500, 700)
    assert len(found) == 3
    last_s = cost().timeline([(2500, 2000)], Granularity("whole")).total_s
    assert found[-1] - found[-2] == pytest.approx(last_s)


def test_packed_prompts_are_one_pass_also_in_chunks() -> None:
    prompts = [(600, 0), (900, 0), (700, 200)]
    timeline = cost().timeline(prompts, Granularity("chunk", 1000))
    assert timeline.next_boundary_s(0.0) == timeline.total_s
    assert timeline.total_s == cost("whole").packed_prefill_s(prompts)


@pytest.mark.parametrize("contexts", [[5], [100, 3000, 7]])
def test_steps_take_their_time_and_are_left_soon(contexts: list[int]) -> None:
    timeline = cost().step_timeline(len(contexts), sum(contexts))
    assert timeline.total_s == cost().decode_step_s(len(contexts), sum(contexts))
    assert timeline.next_boundary_s(0.001) < 0.002


def test_a_prefill_runs_at_the_rate_expected_of_the_device() -> None:
    for num_tokens in (1024, 2048, 4096, 8192):
        assert 10_000 < num_tokens / cost().prefill_s(num_tokens) < 12_500


def test_a_lone_token_is_bound_by_reading_the_weights() -> None:
    read_s = WEIGHT_BYTES / A800.bandwidth
    assert read_s < cost().decode_step_s(1, 1) < 1.5 * read_s
    assert read_s < cost().prefill_s(1) < 1.5 * read_s


def test_decode_steps_read_the_cache_of_every_sequence() -> None:
    step = cost().decode_step_s
    token_bytes = 2 * 2 * LLAMA_3_1_8B.kv_size * LLAMA_3_1_8B.num_layers
    read_s = 90_000 * token_bytes / (A800.bandwidth * EFFICIENCY.bandwidth)
    assert step(16, 100_000) - step(16, 10_000) == pytest.approx(read_s)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_cached_prefix_saves_most_but_not_all_of_its_time(granularity: str) -> None:
    whole_s = cost(granularity).prefill_s(8192)
    rest_s = cost(granularity).prefill_s(8192, 4096)
    assert cost(granularity).prefill_s(4096) < rest_s < 0.7 * whole_s


def test_packing_saves_time_up_to_the_saturation_point() -> None:
    model = cost("whole")
    saturation = model.saturation_tokens
    for num_tokens in (16, 64, 128):
        packed_s = model.packed_prefill_s([(num_tokens, 0), (num_tokens, 0)])
        assert packed_s < 0.95 * 2 * model.prefill_s(num_tokens)
    packed_s = model.packed_prefill_s([(saturation, 0), (saturation, 0)])
    assert packed_s > 0.94 * 2 * model.prefill_s(saturation)


def test_a_pass_of_one_prompt_costs_its_prefill() -> None:
    assert cost().packed_prefill_s([(900, 100)]) == cost().prefill_s(900, 100)


def test_the_cache_takes_what_the_weights_leave() -> None:
    token_bytes = 2 * 2 * LLAMA_3_1_8B.kv_size * LLAMA_3_1_8B.num_layers
    assert num_kv_tokens() * token_bytes + WEIGHT_BYTES == pytest.approx(0.9 * 80e9, rel=0.01)


def test_noise_is_bounded_differs_by_prompt_and_has_no_bias() -> None:
    exact = cost()
    noisy = NoisyPredictor(exact, 0.2, seed=1)
    ratios = [noisy.prefill_s(n) / exact.prefill_s(n) for n in range(1, 2001)]
    assert min(ratios) < 0.82 and max(ratios) > 1.18
    assert all(0.8 <= ratio <= 1.2 for ratio in ratios)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.01)


def test_noise_depends_on_prompt_and_seed_only() -> None:
    noisy = NoisyPredictor(cost("op"), 0.2, seed=1)
    factor = noisy.prefill_s(3000) / cost("op").prefill_s(3000)
    other = NoisyPredictor(cost("chunk:256"), 0.2, seed=1)
    other.prefill_s(7)
    assert other.prefill_s(3000) / cost("chunk:256").prefill_s(3000) == pytest.approx(factor)
    assert noisy.prefill_s(3000, 1000) / cost("op").prefill_s(3000, 1000) == pytest.approx(factor)
    assert NoisyPredictor(cost("op"), 0.2, seed=2).prefill_s(3000) != noisy.prefill_s(3000)


def test_packed_noise_lies_between_that_of_its_prompts() -> None:
    exact = cost()
    noisy = NoisyPredictor(exact, 0.2, seed=1)
    factors = sorted(noisy.prefill_s(n) / exact.prefill_s(n) for n in (100, 200))
    packed = [(100, 0), (200, 0)]
    ratio = noisy.packed_prefill_s(packed) / exact.packed_prefill_s(packed)
    assert factors[0] < ratio < factors[1]


def test_without_error_predictions_are_exact() -> None:
    noisy = NoisyPredictor(cost(), 0.0, seed=1)
    assert noisy.prefill_s(777) == cost().prefill_s(777)
    assert noisy.decode_step_s(4, 900) == cost().decode_step_s(4, 900)
    assert noisy.saturation_tokens == cost().saturation_tokens


@pytest.mark.parametrize("error", [-0.1, 1.0])
def test_senseless_errors_are_refused(error: float) -> None:
    with pytest.raises(ValueError, match="must be in"):
        NoisyPredictor(cost(), error, seed=0)
