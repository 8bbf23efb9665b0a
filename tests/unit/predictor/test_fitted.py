"""The fit on samples whose truth is known, and predictions from known coefficients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.predictor.fitted import FittedPredictor, fit, slice_features, slice_kind
from flowprefill.programs.slices import Group, Slice, SliceLimits

LIMITS = SliceLimits(tile_rows=64, attention_work=64 * 512)
TRUTH = {
    "qkv": (50e-6, 3e-6, 0.0),
    "attention": (80e-6, 2e-6, 9e-9),
    "mlp": (60e-6, 8e-6, 0.0),
    "head": (3e-3, 0.0, 0.2e-6),
    "decode_attention": (100e-6, 5e-6, 0.5e-6),
    "logits": (1e-3, 0.2e-3, 0.0),
}
"""Seconds per constant, row, and key."""
NUM_LAYERS = 4


def all_shapes() -> Iterator[Slice]:
    for rows in (1, 3, 16, 40, 64, 200):
        yield Slice(Group.QKV, 0, rows)
        yield Slice(Group.MLP, 0, rows)
        yield Slice(Group.LOGITS, 0, rows)
        for keys in (rows, 500, 1500, 5000):
            yield Slice(Group.ATTENTION, 0, rows, sequence=0, num_keys=keys)
            yield Slice(Group.ATTENTION, 0, rows, num_keys=keys * rows)
            yield Slice(Group.HEAD, 0, rows, num_keys=keys)


def true_s(piece: Slice) -> float:
    features = slice_features(piece)
    return sum(a * b for a, b in zip(TRUTH[slice_kind(piece)], features, strict=True))


def samples(disturb: Callable[[float], float], repeats: int = 5) -> list[tuple[Slice, float]]:
    return [(piece, disturb(true_s(piece))) for piece in all_shapes() for _ in range(repeats)]


def make_predictor(num_layers: int = NUM_LAYERS) -> FittedPredictor:
    return FittedPredictor(TRUTH, num_layers, LIMITS)


class TestFit:
    def test_exact_samples_give_the_coefficients(self) -> None:
        found = fit(samples(lambda s: s))
        assert found.keys() == TRUTH.keys()
        for kind, expected in TRUTH.items():
            assert found[kind] == pytest.approx(expected, rel=1e-6, abs=1e-12), kind

    @pytest.mark.parametrize("seed", range(5))
    def test_noise_and_outliers_move_predictions_by_less_than_a_tenth(self, seed: int) -> None:
        draw = random.Random(seed)

        def disturb(seconds: float) -> float:
            stolen = 20.0 if draw.random() < 0.05 else 1.0  # another process had the core
            return seconds * draw.uniform(0.95, 1.05) * stolen

        predictor = FittedPredictor(fit(samples(disturb, repeats=20)), NUM_LAYERS, LIMITS)
        for piece in all_shapes():
            assert predictor.slice_s(piece) == pytest.approx(true_s(piece), rel=0.1), piece

    @given(
        st.lists(st.tuples(st.integers(1, 500), st.integers(1, 5000), st.floats(0, 10)), min_size=1)
    )
    def test_no_coefficient_is_ever_negative(self, rows: list[tuple[int, int, float]]) -> None:
        measured = [
            (Slice(Group.ATTENTION, 0, n, sequence=0, num_keys=keys), s) for n, keys, s in rows
        ]
        assert all(value >= 0 for values in fit(measured).values() for value in values)

    def test_times_that_fall_with_size_are_fitted_by_a_constant(self) -> None:
        rows = (10, 20, 40, 80)
        found = fit([(Slice(Group.MLP, 0, n), 1e-3 / n) for n in rows])["mlp"]
        assert found[0] > 0 and found[1:] == (0.0, 0.0)

    def test_kinds_are_fitted_apart(self) -> None:
        found = fit([(Slice(Group.QKV, 0, 8), 1e-3), (Slice(Group.MLP, 0, 8), 2e-3)])
        predictor = FittedPredictor(found, NUM_LAYERS, LIMITS)
        assert predictor.slice_s(Slice(Group.QKV, 0, 8)) == pytest.approx(1e-3)
        assert predictor.slice_s(Slice(Group.MLP, 0, 8)) == pytest.approx(2e-3)


class TestSpeedFactor:
    @staticmethod
    def observe(predictor: FittedPredictor, slowness: float, times: int) -> None:
        """Stretches of ten slices of 1 ms that take `slowness` times as long."""
        for _ in range(times):
            predictor.observe(0.01 * slowness, 0.01 * predictor.speed_factor)

    @pytest.mark.parametrize("slowness", [2.0, 0.5])
    def test_a_device_of_another_speed_is_followed_within_30_observations(
        self, slowness: float
    ) -> None:
        predictor = make_predictor()
        self.observe(predictor, slowness, 30)
        assert predictor.speed_factor == pytest.approx(slowness, rel=0.05)
        self.observe(predictor, 1.0, 30)
        assert predictor.speed_factor == pytest.approx(1.0, rel=0.05)

    def test_one_observation_moves_it_by_a_tenth_of_the_difference(self) -> None:
        predictor = make_predictor()
        self.observe(predictor, 2.0, 1)
        assert predictor.speed_factor == pytest.approx(1.1)

    @given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3))))
    def test_it_stays_bounded(self, stretches: list[tuple[float, float]]) -> None:
        predictor = make_predictor()
        for busy_s, predicted_s in stretches:
            predictor.observe(busy_s, predicted_s)
            assert 0.25 <= predictor.speed_factor <= 4.0

    def test_stretches_too_short_to_measure_are_left_out(self) -> None:
        predictor = make_predictor()
        predictor.observe(1.0, 0.0)
        predictor.observe(1.0, 0.001)
        assert predictor.speed_factor == 1.0

    def test_it_scales_every_prediction(self) -> None:
        predictor, slow = make_predictor(), make_predictor()
        slow.speed_factor = 2.0
        for piece in all_shapes():
            assert slow.slice_s(piece) == 2 * predictor.slice_s(piece)
        assert slow.prefill_s(300) == pytest.approx(2 * predictor.prefill_s(300))
        assert slow.decode_step_s(3, 900) == pytest.approx(2 * predictor.decode_step_s(3, 900))


class TestPasses:
    def test_prefill_is_the_sum_of_its_slices(self) -> None:
        layer = [  # two tiles of 64 rows
            Slice(Group.QKV, 0, 64),
            Slice(Group.ATTENTION, 0, 64, sequence=0, num_keys=64),
            Slice(Group.MLP, 0, 64),
            Slice(Group.QKV, 64, 128),
            Slice(Group.ATTENTION, 64, 128, sequence=0, num_keys=128),
            Slice(Group.MLP, 64, 128),
        ]
        last = [layer[0], layer[3], Slice(Group.HEAD, 0, 128, num_keys=128)]
        expected = (NUM_LAYERS - 1) * sum(map(true_s, layer)) + sum(map(true_s, last))
        assert make_predictor().prefill_s(128) == pytest.approx(expected)

    def test_decode_step_is_the_sum_of_its_slices(self) -> None:
        layer = [
            Slice(Group.QKV, 0, 3),
            Slice(Group.ATTENTION, 0, 3, num_keys=900),
            Slice(Group.MLP, 0, 3),
        ]
        logits = Slice(Group.LOGITS, 0, 3)
        expected = NUM_LAYERS * sum(map(true_s, layer)) + true_s(logits)
        assert make_predictor().decode_step_s(3, 900) == pytest.approx(expected)

    def test_a_decode_step_of_nobody_takes_no_time(self) -> None:
        assert make_predictor().decode_step_s(0, 0) == 0.0

    @given(st.integers(1, 3000), st.integers(1, 3000))
    def test_longer_prompts_take_longer(self, length: int, more: int) -> None:
        predictor = make_predictor()
        assert predictor.prefill_s(length) < predictor.prefill_s(length + more)

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
