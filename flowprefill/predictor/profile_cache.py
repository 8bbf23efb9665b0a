"""ProfileCache: profiles on disk, so that only the first load of a model on a machine takes them.

One JSON file for each key. A file that cannot be read, or is not what its name says, is as good as
none; so nothing that happens to this folder can fail a load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from flowprefill.predictor.profile import Profile
from flowprefill.user_cache import make_directory, replacing, user_cache_directory

PROFILE_FORMAT = 2
"""Part of every key; raised when the same passes would be read or taken in another way."""

Key = Mapping[str, str | int]
"""Everything that a profile depends on, by name."""


class TakesProfiles(Protocol):
    """Runs passes of a model that nobody else uses meanwhile, of up to max_tokens."""

    def warm_up(self, max_tokens: int) -> None:
        """Run what the first passes would wait for."""
        ...

    def profile(self, max_tokens: int, on_progress: Callable[[float], None]) -> Profile:
        """Take a profile; on_progress gets the fraction done."""
        ...


class ProfileCache:
    """A folder of profiles."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @staticmethod
    def default_directory() -> Path:
        """Below the user's cache directory."""
        return user_cache_directory("profiles")

    def load(self, key: Key) -> Profile | None:
        """The profile of exactly this key; None if there is none that can be used."""
        try:
            content = json.loads(self.path(key).read_text(encoding="utf-8"))
            if content["key"] == _complete(key):
                return Profile.from_json(content["profile"])
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            pass  # absent, unreadable, or no profile of ours
        return None

    def store(self, key: Key, profile: Profile) -> None:
        """Keep the profile; other processes see all of it or nothing. Raises OSError."""
        content = {"key": _complete(key), "profile": profile.to_json()}
        make_directory(self.directory)
        with replacing(self.path(key)) as file:
            file.write(json.dumps(content).encode())

    def try_store(self, key: Key, profile: Profile) -> str | None:
        """Keep the profile if it is worth it. Returns why not, if it was not kept."""
        if not profile.is_steady:
            return "the machine was busy with something else"
        try:
            self.store(key, profile)
        except OSError as error:
            return str(error)
        return None

    def load_or_take(
        self,
        key: Key,
        profiler: TakesProfiles,
        max_tokens: int,
        on_progress: Callable[[str, float], None],
        refresh: bool = False,
    ) -> Profile:
        """The one that is kept, unless `refresh`, or a new one. One that cannot be kept costs a
        stage of its own that says why."""
        found = None if refresh else self.load(key)
        if found:
            profiler.warm_up(max_tokens)
            on_progress("profile from the cache", 1.0)
            return found
        profile = profiler.profile(max_tokens, lambda fraction: on_progress("profile", fraction))
        problem = self.try_store(key, profile)
        if problem:
            on_progress(f"profile not kept for later loads: {problem}", 1.0)
        return profile

    def path(self, key: Key) -> Path:
        """The file of this key."""
        text = json.dumps(_complete(key), sort_keys=True)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _complete(key: Key) -> dict[str, str | int]:
    return {"format": PROFILE_FORMAT, **key}
