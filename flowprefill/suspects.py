"""Suspects: which request kills the engine, told from those that were only there.

Clients send a request again when the engine died with it. One that kills each engine would take the
others along every time, until the engine is not restarted any more. So it is looked for:

- An engine dies: all that were in it have been in one death.
- The next one dies. Exactly one request of it was in a death before: that one is to blame, and
  refused from now on. Several were: each of them may from now on be in the engine only while no
  other one of them is, so that a further death names one.
- A request that ends in a living engine is cleared, unless that refused it: then it has not run.

Pure: no process, no lock, no clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flowprefill.errors import EngineKillerError
from flowprefill.request import Request

FORGET_S = 3600.0
"""After so long a request is as good as any other: what killed engines may not have been in it."""
_MAX_REMEMBERED = 4096

_ONCE, _MUST_BE_ALONE, _REFUSED = range(1, 4)


@dataclass(frozen=True)
class _Suspicion:
    level: int
    since_s: float


class Suspects:
    """Remembers requests by what they ask for: a second copy is the same request."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Suspicion] = {}  # the oldest first
        self._alone: int | None = None  # req_id of the one inside that no other suspect may join

    def refusal(self, request: Request, now_s: float) -> EngineKillerError | None:
        """What a request that is to blame is answered; None for any other."""
        if self._level(request, now_s) != _REFUSED:
            return None
        return EngineKillerError(
            f"the engine died twice with this request in it: it is refused for {FORGET_S:.0f} s"
        )

    def may_enter(self, request: Request, now_s: float) -> bool:
        """Whether it may go into the engine, beside those that are in it."""
        return self._alone is None or self._level(request, now_s) < _MUST_BE_ALONE

    def enter(self, request: Request, now_s: float) -> None:
        """It goes into the engine."""
        if self._level(request, now_s) >= _MUST_BE_ALONE:
            self._alone = request.req_id

    def leave(self, req_id: int) -> None:
        """It is no longer in the engine, which may not have run it."""
        if self._alone == req_id:
            self._alone = None

    def clear(self, request: Request, now_s: float) -> None:
        """It has run and ended, and the engine lives."""
        self.leave(request.req_id)
        if self._known:
            self._known.pop(request.digest, None)
            self._forget(now_s)

    def on_death(self, inside: Collection[Request], now_s: float) -> Request | None:
        """The engine died with the requests `inside`. Returns the one to blame, if clear."""
        self._alone = None
        self._forget(now_s)
        by_digest = {request.digest: request for request in inside}
        again = [request for request in by_digest.values() if self._level(request, now_s)]
        to_blame = again[0] if len(again) == 1 else None
        for digest, request in by_digest.items():
            level = _ONCE
            if request in again:
                level = _MUST_BE_ALONE if to_blame is None else _REFUSED
            self._known.pop(digest, None)  # so that it becomes the newest
            self._known[digest] = _Suspicion(level, now_s)
        while len(self._known) > _MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        return to_blame

    def _level(self, request: Request, now_s: float) -> int:
        """0 = nothing is known of it."""
        if not self._known:  # requests are long, and deaths are rare
            return 0
        suspicion = self._known.get(request.digest)
        if suspicion is None or now_s - suspicion.since_s > FORGET_S:
            return 0
        return suspicion.level

    def _forget(self, now_s: float) -> None:
        """Drop what is too old, so that with nothing known requests cost nothing again."""
        while self._known:
            digest, suspicion = next(iter(self._known.items()))
            if now_s - suspicion.since_s <= FORGET_S:
                return
            del self._known[digest]
