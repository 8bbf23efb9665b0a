"""The fit on samples whose truth is known, and predictions from known coefficients."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.granularity import Granularity
from flowprefill.predictor.fitted import FittedPredictor, fit, fit_choice
from flowprefill.predictor.pass_seconds import PassSeconds
from flowprefill.programs.slices import (
    Group,
    Slice,
    SliceLimits,
    Span,
    plan_decode,
    plan_prefill,
)
from tests.unit.predictor.shapes import (
    LIMITS,
    NUM_LAYERS,
    TRUTH,
    all_shapes,
    make_predictor,
    true_s,
)

TILES = LIMITS.key_tiles


def samples(disturb: Callable[[float], float], repeats: int = 5) -> list[tuple[Slice, float]]:
    return [(piece, disturb(true_s(piece))) for piece in all_shapes() for _ in range(repeats)]


class TestFit:
    def test_exact_samples_give_the_coefficients(self) -> None:
        found = fit(samples(lambda s: s), TILES)
        assert found.keys() == TRUTH.keys()
        for kind, expected in TRUTH.items():
            assert found[kind] == pytest.approx(expected, rel=1e-6, abs=1e-11), kind

    @pytest.mark.parametrize("seed", range(5))
    def test_noise_and_outliers_move_predictions_by_less_than_a_tenth(self, seed: int) -> None:
        draw = random.Random(seed)

        def disturb(seconds: float) -> float:
            stolen = 20.0 if draw.random() < 0.05 else 1.0  # another process had the core
            return seconds * draw.uniform(0.95, 1.05) * stolen

        predictor = FittedPredictor(fit(samples(disturb, repeats=20), TILES), NUM_LAYERS, LIMITS)
        for piece in all_shapes():
            assert predictor.slice_s(piece) == pytest.approx(true_s(piece), rel=0.1), piece

    @settings(deadline=None)
    @given(
        st.lists(st.tuples(st.integers(1, 500), st.integers(1, 5000), st.floats(0, 10)), min_size=1)
    )
    def test_no_coefficient_is_ever_negative(self, rows: list[tuple[int, int, float]]) -> None:
        measured = [
            (Slice(Group.ATTENTION, 0, n, sequence=0, num_keys=keys), s) for n, keys, s in rows
        ]
        assert all(value >= 0 for values in fit(measured, TILES).values() for value in values)

    def test_times_that_fall_with_size_are_fitted_by_a_constant(self) -> None:
        rows = (10, 20, 40, 80)
        found = fit([(Slice(Group.MLP, 0, n), 1e-3 / n) for n in rows], TILES)["mlp"]
        assert found[0] > 0 and not any(found[1:])

    def test_a_device_that_is_flat_up_to_a_knee_is_followed(self) -> None:
        def seconds(num_rows: int) -> float:
            return max(1e-3, num_rows * 1e-3 / 200)  # weights read, or arithmetic

        measured = [(Slice(Group.MLP, 0, n), seconds(n)) for n in (1, *(16 << i for i in range(8)))]
        predictor = FittedPredictor(fit(measured, TILES), NUM_LAYERS, LIMITS)
        for n in range(1, 2048, 11):
            assert predictor.slice_s(Slice(Group.MLP, 0, n)) == pytest.approx(seconds(n), rel=0.25)

    def test_kinds_are_fitted_apart(self) -> None:
        found = fit([(Slice(Group.QKV, 0, 8), 1e-3), (Slice(Group.MLP, 0, 8), 2e-3)], TILES)
        predictor = FittedPredictor(found, NUM_LAYERS, LIMITS)
        assert predictor.slice_s(Slice(Group.QKV, 0, 8)) == pytest.approx(1e-3)
        assert predictor.slice_s(Slice(Group.MLP, 0, 8)) == pytest.approx(2e-3)

    def test_the_choice_of_tokens_is_a_constant_and_a_part_per_row(self) -> None:
        found = fit_choice([(n, 1e-3 + n * 2e-4) for n in (1, 4, 16)])
        assert found == pytest.approx((1e-3, 2e-4))


def chunk_passes(span: Span, size: int) -> list[Span]:
    """What `chunk:size` makes of a prompt: it ends a pass at each multiple of size."""
    edges = [p for p in range(span.start + 1, span.end) if p % size == 0]
    return [Span(a, b) for a, b in zip([span.start, *edges], [*edges, span.end], strict=True)]


def plan_s(spans: list[Span], limits: SliceLimits, num_layers: int, is_final: bool = True) -> float:
    """Truth of one pass, slice by slice."""
    plan = plan_prefill(spans, limits, Granularity("tile"), is_final)
    return plan.total_s(true_s, num_layers)


LIMITS_DRAWN = st.builds(
    SliceLimits,
    tile_rows=st.sampled_from([16, 48, 64, 512]),
    attention_work=st.integers(1, 200_000),
    mlp_rows=st.sampled_from([None, 16, 40, 64]),
)
PROMPTS = st.tuples(st.integers(1, 3000), st.integers(0, 2999)).filter(lambda p: p[1] < p[0])
"""(num_tokens, num_cached_tokens)"""


class TestPrefills:
    @settings(deadline=None)
    @given(st.lists(PROMPTS, min_size=1, max_size=6), LIMITS_DRAWN, st.integers(1, 5))
    def test_a_pass_takes_the_sum_of_its_slices(
        self, prompts: list[tuple[int, int]], limits: SliceLimits, num_layers: int
    ) -> None:
        predictor = make_predictor(limits=limits, num_layers=num_layers)
        spans = [Span(cached, tokens) for tokens, cached in prompts]
        expected = plan_s(spans, limits, num_layers)
        assert predictor.packed_prefill_s(prompts) == pytest.approx(expected, rel=1e-9)
        for (tokens, cached), span in zip(prompts, spans, strict=True):
            alone = plan_s([span], limits, num_layers)
            assert predictor.prefill_s(tokens, cached) == pytest.approx(alone, rel=1e-9)

    @settings(deadline=None)
    @given(PROMPTS, st.sampled_from([1, 7, 64, 100, 512, 5000]), LIMITS_DRAWN)
    def test_chunks_take_the_sum_of_their_passes(
        self, prompt: tuple[int, int], size: int, limits: SliceLimits
    ) -> None:
        predictor = make_predictor(f"chunk:{size}", limits)
        tokens, cached = prompt
        *before, last = chunk_passes(Span(cached, tokens), size)
        expected = sum(plan_s([span], limits, NUM_LAYERS, is_final=False) for span in before)
        expected += plan_s([last], limits, NUM_LAYERS)
        assert predictor.prefill_s(tokens, cached) == pytest.approx(expected, rel=1e-9)
        assert predictor.packed_prefill_s([prompt]) == predictor.prefill_s(tokens, cached)
        both = plan_s([Span(cached, tokens)] * 2, limits, NUM_LAYERS)  # packed, nothing is cut
        assert predictor.packed_prefill_s([prompt, prompt]) == pytest.approx(both, rel=1e-9)

    @pytest.mark.parametrize("granularity", ["whole", "layer", "op"])
    def test_only_chunks_run_other_slices(self, granularity: str) -> None:
        expected = make_predictor("tile").prefill_s(700, 30)
        assert make_predictor(granularity).prefill_s(700, 30) == expected

    def test_an_answer_does_not_depend_on_what_was_asked_before(self) -> None:
        asked = make_predictor()
        for tokens in (3000, 10, 900):
            asked.prefill_s(tokens, tokens // 3)
        for tokens in (1, 64, 65, 900, 4000):
            assert asked.prefill_s(tokens) == make_predictor().prefill_s(tokens)

    def test_a_long_prompt_asks_for_a_few_slices_once_its_tiles_are_known(self) -> None:
        asked: list[Slice] = []

        def cost(piece: Slice) -> float:
            asked.append(piece)
            return true_s(piece)

        passes = PassSeconds(cost, NUM_LAYERS, LIMITS)
        passes.prefill_pass_s([Span(0, 131_072)], is_final=True)
        asked.clear()
        passes.prefill_pass_s([Span(1, 131_071)], is_final=True)
        assert 0 < len(asked) < 12

    @settings(deadline=None)
    @given(st.integers(1, 3000), st.integers(1, 3000))
    def test_longer_prompts_take_longer(self, length: int, more: int) -> None:
        predictor = make_predictor()
        assert predictor.prefill_s(length) < predictor.prefill_s(length + more)

    @settings(deadline=None)
    @given(st.integers(2, 3000), st.data())
    def test_cached_tokens_shorten_a_prefill(self, length: int, data: st.DataObject) -> None:
        predictor = make_predictor()
        fewer = data.draw(st.integers(0, length - 2))
        cached = data.draw(st.integers(fewer + 1, length - 1))
        assert 0 < predictor.prefill_s(length, cached) < predictor.prefill_s(length, fewer)

    def test_a_model_of_one_layer_is_its_last_layer_alone(self) -> None:
        without = {kind: TRUTH[kind] for kind in TRUTH if kind != "attention"}  # it runs none
        predictor = FittedPredictor(without, 1, LIMITS)
        qkv, head = Slice(Group.QKV, 0, 64), Slice(Group.HEAD, 0, 64, num_keys=64)
        assert predictor.prefill_s(64) == pytest.approx(true_s(qkv) + true_s(head))
        assert predictor.decode_step_s(1, 64) > 0


class TestDecode:
    @settings(deadline=None)
    @given(st.integers(1, 40), st.integers(0, 5000), LIMITS_DRAWN)
    def test_a_step_takes_the_sum_of_its_slices_and_the_choice_of_tokens(
        self, num_seqs: int, num_keys: int, limits: SliceLimits
    ) -> None:
        predictor = make_predictor(limits=limits)
        plan = plan_decode([num_keys] * num_seqs, limits, NUM_LAYERS)
        expected = plan.total_s(true_s, NUM_LAYERS)
        expected += 1e-3 + 0.5e-3 * num_seqs
        found = predictor.decode_step_s(num_seqs, num_seqs * num_keys)
        assert found == pytest.approx(expected, rel=1e-9)

    def test_a_step_of_nobody_takes_no_time(self) -> None:
        assert make_predictor().decode_step_s(0, 0) == 0.0


class TestSaturation:
    @staticmethod
    def tokens(pass_s: float, token_s: float, tile_rows: int = 512) -> int:
        """On a device with a fixed cost per pass and per token."""
        coefficients = {kind: (0.0, 0.0) for kind in TRUTH}
        coefficients["head"] = (pass_s, 0.0)
        coefficients["mlp"] = (0.0, token_s / (NUM_LAYERS - 1))
        limits = SliceLimits(tile_rows, attention_work=1 << 20)
        return FittedPredictor(coefficients, NUM_LAYERS, limits).saturation_tokens

    def test_it_is_where_a_pass_s_fixed_cost_is_a_tenth_of_the_rest(self) -> None:
        assert self.tokens(pass_s=0.010, token_s=1e-3) == 128  # 100, in steps of 64
        assert self.tokens(pass_s=0.100, token_s=1e-3) == 1024

    def test_without_a_fixed_cost_it_is_the_smallest_step(self) -> None:
        assert self.tokens(pass_s=0.0, token_s=1e-3) == 64

    def test_a_device_that_never_saturates_has_a_bound(self) -> None:
        assert self.tokens(pass_s=1e9, token_s=1e-9) == 65_536

    def test_attention_s_context_does_not_move_it(self) -> None:
        expected = make_predictor().saturation_tokens
        far = {**TRUTH, "attention": (80e-6, 2e-6, 3e-4, 1e-4, 9e-6, 4e-6)}
        assert FittedPredictor(far, NUM_LAYERS, LIMITS).saturation_tokens == expected


class TestSpeed:
    def test_the_factor_scales_every_prediction(self) -> None:
        predictor, slow = make_predictor(), make_predictor()
        for _ in range(10):
            slow.observe(2.0, 1.0)
        assert slow.speed_factor == 2.0
        for piece in all_shapes():
            assert slow.slice_s(piece) == 2 * predictor.slice_s(piece)
            assert slow.profiled_s(piece) == predictor.slice_s(piece)
        assert slow.prefill_s(300) == 2 * predictor.prefill_s(300)
        assert slow.packed_prefill_s([(300, 9), (8, 0)]) == pytest.approx(
            2 * predictor.packed_prefill_s([(300, 9), (8, 0)])
        )
        assert slow.decode_step_s(3, 900) == pytest.approx(2 * predictor.decode_step_s(3, 900))
        assert slow.saturation_tokens == predictor.saturation_tokens
