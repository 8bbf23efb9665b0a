"""Ranks: the processes that follow rank 0, as rank 0 holds them: starts, watches and ends them."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flowprefill.child_process import describe_exit, spawn_module, wait_exit
from flowprefill.parallel.collectives import Collectives, open_store
from flowprefill.parallel.errors import RankError
from flowprefill.parallel.stop_word import StopWord
from flowprefill.wire import Channel, Kind, Message, pack, unpack_error

REAP_S = 2.0
FOLLOWER = "flowprefill.follower"


class Ranks:
    """All ranks but ours. When one ends, all of them are ended."""

    def __init__(self, num_ranks: int, start: dict[str, Any], module: str = FOLLOWER) -> None:
        """Start them. start: of the START message; rank and port are added
        module: what they run
        Raises RankError if a process cannot be started, ConfigError as open_store does.
        """
        self.num_ranks = num_ranks
        self.word = StopWord.create()
        self._lock = threading.Lock()
        self._is_closing = False
        self._death: str | None = None
        self._died = threading.Event()
        self._on_death: Callable[[RankError], None] | None = None
        self._collectives: Collectives | None = None
        self._meeting_ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        """What went wrong when the others were to be met."""
        self._children: list[_Child] = []
        try:
            self._store = open_store()
            for rank in range(1, num_ranks):
                self._children.append(_Child(rank, module, self.word.fd, self._note_end))
            for child in self._children:
                child.watch({**start, "rank": child.rank, "port": self._store.port})
        except BaseException as error:
            self.close()
            if isinstance(error, OSError):
                raise RankError(f"a rank cannot be started: {error}") from error
            raise

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [child.process.pid for child in self._children]

    def agree_on_blocks(self, num_blocks: int, device: torch.device) -> int:
        """Wait until the others have loaded; returns the number of KV blocks that all have room
        for, and are told, and meets them for sums.

        Raises what a rank failed with, RankError if it ended.
        """
        loaded = [child.expect(Kind.LOADED, self._failure) for child in self._children]
        smallest: int = min(num_blocks, *loaded)
        self.send(Kind.ALLOCATE, smallest)
        self._meet(device)
        return smallest

    def _meet(self, device: torch.device) -> None:
        """Make the group of all ranks. Raises RankError if one ended meanwhile."""
        if device.type != "cuda":
            self._make_collectives(device)  # gloo gives up by itself
            return

        def meet() -> None:
            try:
                self._make_collectives(device)
            except Exception as error:
                self._meeting_ends.put(error)
            else:
                self._meeting_ends.put(None)

        # NCCL waits for ever for a rank that has ended
        threading.Thread(target=meet, name="rank-meeting", daemon=True).start()
        error = self._meeting_ends.get()
        if error:
            raise error

    def _make_collectives(self, device: torch.device) -> None:
        self._collectives = Collectives(self._store, 0, self.num_ranks, device)

    def wait_ready(self) -> None:
        """Until the others can run passes. Raises as agree_on_blocks does."""
        for child in self._children:
            child.expect(Kind.READY, self._failure)

    def sum(self, partial: Tensor) -> Tensor:
        """See Collectives."""
        assert self._collectives is not None, "not before they have loaded"
        return self._collectives.sum(partial)

    def send(self, kind: Kind, body: object = None) -> None:
        """To all of them; never waits."""
        packed = pack(kind, body)
        for child in self._children:
            child.channel.send(packed)

    def check(self) -> None:
        """Raises RankError if one is gone."""
        if self._death:
            raise RankError(self._death)

    def explain(self, error: RankError) -> RankError:
        """What lies behind a sum that failed: a rank that ended, of which we hear in a moment."""
        self._died.wait(REAP_S)
        return RankError(self._death) if self._death else error

    def call_on_death(self, on_death: Callable[[RankError], None]) -> None:
        """on_death: called once when a rank ends, on another thread, or at once if one has."""
        with self._lock:
            self._on_death = on_death
        if self._death:
            on_death(RankError(self._death))

    def close(self) -> None:
        """End them. Bounded; what they run is not waited for."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
        if not is_first:
            return
        for child in self._children:
            child.end(is_broken=self._death is not None)
        if self._collectives:
            self._collectives.close()
        self.word.close()

    def _failure(self) -> RankError:
        self._died.wait(REAP_S)
        return RankError(self._death or "a rank ended")

    def _note_end(self, child: _Child) -> None:
        """A rank has ended, or its channel has: nothing can go on. On its watcher's thread."""
        how = child.reap()
        with self._lock:
            if self._is_closing or self._death:
                return
            self._death = f"rank {child.rank} of {self.num_ranks} {how}"
            on_death = self._on_death
        self._died.set()
        self._meeting_ends.put(RankError(self._death))
        for other in self._children:
            other.process.kill()
        if on_death:
            on_death(RankError(self._death))
        if self._collectives:
            self._collectives.abort()


class _Child:
    """One rank's process and channel."""

    def __init__(
        self, rank: int, module: str, word_fd: int, on_end: Callable[[_Child], None]
    ) -> None:
        self.rank = rank
        self._on_end = on_end
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._failure: list[str] | None = None
        self.process, ours = spawn_module(module, [word_fd])
        self.channel = Channel(ours)
        self._watcher = threading.Thread(target=self._watch, name=f"rank-{rank}", daemon=True)

    def watch(self, start: dict[str, Any]) -> None:
        """Have it load, and listen to it."""
        self.channel.send(pack(Kind.START, start))
        self._watcher.start()

    def expect(self, kind: Kind, failure: Callable[[], RankError]) -> Any:
        """The body of its next message. Raises what it failed with, or failure()."""
        message = self._messages.get()
        if message is None:
            if self._failure:
                raise unpack_error(self._failure)
            raise failure()
        found, body = message
        assert found is kind, f"{found} instead of {kind}"
        return body

    def reap(self) -> str:
        """How it ended; killed if it has not."""
        code = wait_exit(self.process, REAP_S)
        if self._failure:
            return f"failed: {self._failure[1]}"
        return "does not answer" if code is None else describe_exit(code)

    def end(self, is_broken: bool) -> None:
        if not is_broken:
            self.channel.send(pack(Kind.CLOSE))
            wait_exit(self.process, REAP_S)
        self.process.kill()  # Popen never signals a pid that was reaped
        wait_exit(self.process, REAP_S)  # stuck in a driver: left behind
        self.channel.close()
        if self._watcher.ident is not None:
            self._watcher.join(REAP_S)
        assert self.process.stdin is not None
        self.process.stdin.close()

    def _watch(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                for kind, body in self.channel.receive():
                    if kind is Kind.FAILED:
                        self._failure = body
                    else:
                        self._messages.put((kind, body))
        self._on_end(self)
        self._messages.put(None)
