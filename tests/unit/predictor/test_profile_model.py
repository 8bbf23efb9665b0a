"""profile_model: the profile is on the disk if it can be, and never at the price of a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flowprefill.granularity import Granularity
from flowprefill.loading import LoadedModel, profile_model
from flowprefill.predictor.fitted import FittedPredictor
from flowprefill.predictor.profile import Profile
from flowprefill.predictor.profile_cache import ProfileCache
from tests.factories import write_tiny_model
from tests.unit.programs.runs import load_quietly as load

MAX_LEN = 512


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), max_len=MAX_LEN)


class TickingClock:
    """Each look at it takes as long as the other ones: all slices take one tick."""

    def __init__(self, tick_s: float = 1e-3) -> None:
        self._tick_s = tick_s
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += self._tick_s
        return self._now_s


def profile_with(
    model: LoadedModel, cache: ProfileCache, refresh: bool = False, tick_s: float = 1e-3
) -> tuple[Profile, list[str]]:
    """The profile, and the stages that were told."""
    stages: dict[str, float] = {}

    def note(stage: str, fraction: float) -> None:
        assert fraction >= stages.get(stage, 0.0)
        stages[stage] = fraction

    profile = profile_model(model, TickingClock(tick_s), note, cache, refresh)
    assert set(stages.values()) == {1.0}
    return profile, list(stages)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "profiles")


def test_the_second_load_takes_the_first_one_s(directory: Path, cache: ProfileCache) -> None:
    first, stages = profile_with(load(directory), cache)
    assert not first.is_cached and stages == ["profile"]
    second, stages = profile_with(load(directory), cache)
    assert second.is_cached and stages == ["profile from the cache"]
    assert second.samples == first.samples and second.choices == first.choices
    assert second.is_bit_invariant is first.is_bit_invariant is True


def test_a_refresh_takes_a_new_one_and_keeps_it(directory: Path, cache: ProfileCache) -> None:
    model = load(directory)
    first, _ = profile_with(model, cache)
    second, _ = profile_with(model, cache, refresh=True, tick_s=2e-3)
    assert not second.is_cached and second.samples != first.samples
    assert profile_with(model, cache)[0].samples == second.samples


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "bfloat16"},
        {"num_threads": 2},
        {"max_slice_ms": 1.0},
        {"block_size": 32},
        {"max_model_len": 300},
    ],
)
def test_what_changes_times_takes_another(
    directory: Path, cache: ProfileCache, config: dict[str, Any]
) -> None:
    profile_with(load(directory), cache)
    assert not profile_with(load(directory, **config), cache)[0].is_cached


def test_other_weights_of_the_same_shape_take_another(
    directory: Path, tmp_path: Path, cache: ProfileCache
) -> None:
    profile_with(load(directory), cache)
    other = write_tiny_model(tmp_path / "other", max_len=MAX_LEN, seed=1)
    assert not profile_with(load(other), cache)[0].is_cached
    again = write_tiny_model(tmp_path / "again", max_len=MAX_LEN)
    assert profile_with(load(again), cache)[0].is_cached


@pytest.mark.parametrize("content", ["", "{}", '{"key": {}, "profile": {}}', "\0" * 100])
def test_a_broken_file_is_replaced(directory: Path, cache: ProfileCache, content: str) -> None:
    model = load(directory)
    profile_with(model, cache)
    (file,) = cache.directory.iterdir()
    file.write_text(content)
    assert not profile_with(model, cache)[0].is_cached
    assert profile_with(model, cache)[0].is_cached


def test_a_folder_that_takes_no_files_costs_one_line(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file" / "profiles")
    profile, stages = profile_with(load(directory), cache)
    assert profile.samples
    assert len(stages) == 2 and stages[0] == "profile"
    assert stages[1].startswith("profile not kept for later loads: ")
    assert str(tmp_path) in stages[1]


def test_a_profile_predicts_every_prefill_and_step(directory: Path, cache: ProfileCache) -> None:
    model = load(directory)
    profile, _ = profile_with(model, cache)
    predictor = FittedPredictor.from_profile(
        profile, model.spec.num_layers, model.program.limits, Granularity.parse("tile")
    )
    times = [predictor.prefill_s(n) for n in (1, 10, 100, 511)]
    assert times == sorted(times) and times[0] > 0
    assert 0 < predictor.decode_step_s(1, 10) <= predictor.decode_step_s(16, 16 * 400)
    assert predictor.saturation_tokens >= 64
