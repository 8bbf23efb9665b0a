"""Profiles on disk: what is written is read, and whatever else is there is as good as nothing."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.predictor import profile_cache
from flowprefill.predictor.profile import Profile
from flowprefill.predictor.profile_cache import ProfileCache
from flowprefill.programs.slices import Group, Slice

KEY = {"model": "abc", "device": "EPYC", "num_threads": 2}
PROFILE = Profile(
    samples=[
        (Slice(Group.QKV, 0, 16), 0.25e-3),
        (Slice(Group.ATTENTION, 0, 16, sequence=0, position=96, num_keys=112), 1e-3 / 3),
        (Slice(Group.ATTENTION, 0, 4, num_keys=2048), 2e-3),
    ],
    choices=[(1, 0.5e-3), (4, 2e-3)],
    is_bit_invariant=False,
    calibration_s=4.25,
)


@pytest.fixture
def cache(tmp_path: Path) -> ProfileCache:
    return ProfileCache(tmp_path / "not" / "yet" / "there")


def test_what_is_stored_is_loaded_and_says_so(cache: ProfileCache) -> None:
    assert cache.load(KEY) is None
    cache.store(KEY, PROFILE)
    found = cache.load(KEY)
    assert found is not None and found.is_cached
    assert found.samples == PROFILE.samples and found.choices == PROFILE.choices
    assert found.is_bit_invariant is False and found.calibration_s == 4.25


@pytest.mark.parametrize(
    "other",
    [
        {**KEY, "model": "abd"},
        {**KEY, "num_threads": 1},
        {**KEY, "dtype": "bfloat16"},
        {"model": "abc", "device": "EPYC"},
    ],
)
def test_a_profile_is_found_under_its_own_key_only(
    cache: ProfileCache, other: dict[str, Any]
) -> None:
    cache.store(KEY, PROFILE)
    assert cache.load(other) is None
    assert cache.load(dict(reversed(KEY.items()))) is not None


def test_another_format_is_another_key(
    cache: ProfileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.store(KEY, PROFILE)
    monkeypatch.setattr(profile_cache, "PROFILE_FORMAT", profile_cache.PROFILE_FORMAT + 1)
    assert cache.load(KEY) is None


def test_a_later_profile_takes_the_place_of_the_earlier(cache: ProfileCache) -> None:
    cache.store(KEY, PROFILE)
    cache.store(KEY, Profile(PROFILE.samples, PROFILE.choices, True, 1.5))
    found = cache.load(KEY)
    assert found is not None and found.is_bit_invariant and found.calibration_s == 1.5
    assert [p.name for p in cache.directory.iterdir()] == [cache.path(KEY).name]


def test_a_file_of_another_key_under_this_name_is_ignored(cache: ProfileCache) -> None:
    foreign = {**KEY, "device": "Xeon"}
    cache.store(foreign, PROFILE)
    cache.path(foreign).rename(cache.path(KEY))
    assert cache.load(KEY) is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00", b"null", b"[]", b"{}", b'"key"', b"[" * 9999]
)
def test_a_file_that_is_no_profile_is_ignored(cache: ProfileCache, content: bytes) -> None:
    cache.store(KEY, PROFILE)
    cache.path(KEY).write_bytes(content)
    assert cache.load(KEY) is None


def test_a_file_that_ends_early_is_ignored(cache: ProfileCache) -> None:
    cache.store(KEY, PROFILE)
    path = cache.path(KEY)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert cache.load(KEY) is None, length


JUNK = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.integers(max_value=-1), st.integers(min_value=2**40),
)  # fmt: skip


@settings(deadline=None)
@given(st.data())
def test_a_value_that_cannot_be_makes_the_file_no_profile(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    cache = ProfileCache(tmp_path_factory.mktemp("profiles"))
    cache.store(KEY, PROFILE)
    content = json.loads(cache.path(KEY).read_text())
    values = content["profile"]
    place = data.draw(
        st.sampled_from(["samples", "choices", "is_bit_invariant", "sample", "choice"])
    )
    if place == "sample":
        target, index = data.draw(st.sampled_from(values["samples"])), data.draw(st.integers(0, 6))
    elif place == "choice":
        target, index = data.draw(st.sampled_from(values["choices"])), data.draw(st.integers(0, 1))
    else:
        target, index = values, place
    before = target[index]
    junk = data.draw(JUNK.filter(lambda value: not _could_be(before, value)))
    target[index] = junk
    cache.path(KEY).write_text(json.dumps(content))
    assert cache.load(KEY) is None


def _could_be(before: object, value: object) -> bool:
    if isinstance(before, float):
        return isinstance(value, float) and 0 <= value < float("inf")
    # a slice without a sequence is one of a decode step
    return value is None or (isinstance(before, bool) and isinstance(value, bool))


def test_a_folder_in_the_file_s_place_is_ignored(cache: ProfileCache) -> None:
    cache.path(KEY).mkdir(parents=True)
    assert cache.load(KEY) is None
    with pytest.raises(OSError):
        cache.store(KEY, PROFILE)
    assert [p for p in cache.directory.iterdir() if p.suffix == ".tmp"] == []


def test_trying_to_keep_it_says_what_prevents_that(cache: ProfileCache, tmp_path: Path) -> None:
    assert cache.try_store(KEY, PROFILE) is None
    assert cache.load(KEY) is not None
    (tmp_path / "file").write_text("")
    problem = ProfileCache(tmp_path / "file" / "profiles").try_store(KEY, PROFILE)
    assert problem is not None and str(tmp_path / "file") in problem


def test_a_profile_that_is_not_steady_is_not_kept(cache: ProfileCache) -> None:
    problem = cache.try_store(KEY, dataclasses.replace(PROFILE, is_steady=False))
    assert problem == "the machine was busy with something else"
    assert cache.load(KEY) is None


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ProfileCache(tmp_path / "file" / "profiles")
    assert cache.load(KEY) is None
    with pytest.raises(OSError):
        cache.store(KEY, PROFILE)


class TestDirectory:
    def test_it_is_the_user_s_cache(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "/some/cache")
        assert ProfileCache.default_directory() == Path("/some/cache/flowprefill/profiles")

    @pytest.mark.parametrize("unset", ["", "relative/path"])
    def test_without_one_it_is_below_home(
        self, monkeypatch: pytest.MonkeyPatch, unset: str
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setenv("HOME", "/home/someone")
        found = ProfileCache.default_directory()
        assert found == Path("/home/someone/.cache/flowprefill/profiles")

    def test_without_a_home_nothing_is_written(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for an unknown user
        monkeypatch.chdir(tmp_path)
        cache = ProfileCache(ProfileCache.default_directory())
        assert cache.load(KEY) is None
        with pytest.raises(OSError, match="home directory"):
            cache.store(KEY, PROFILE)
        assert list(tmp_path.iterdir()) == []
