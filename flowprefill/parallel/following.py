"""Follower: runs the slices that rank 0 runs, as far as it lets it. Decides nothing.

At each boundary it looks at the StopWord. While that names the boundary where it stands, it waits:
rank 0 either publishes a further one, or says by a message that the run was left here. A message
may also say that it was left further on, where rank 0 has been meanwhile, or that another run has
begun, so this pass is done. A rank that is past the place has done work that rank 0 did not: its
keys and sums belong to nothing, so that is fatal.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import Any

from flowprefill.parallel.errors import RankError
from flowprefill.parallel.messages import PassReader
from flowprefill.parallel.stop_word import MAX_BOUNDARY, StopWord
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.program import ProgramState
from flowprefill.wire import Kind, Message

_LOOKS = 50
"""At the word, before it sleeps between two; few, as the reader waits for the interpreter lock."""
_PAUSE_S = 50e-6


class Follower:
    """One rank's passes."""

    def __init__(
        self,
        program: DecoderProgram,
        reader: PassReader,
        word: StopWord,
        messages: queue.SimpleQueue[Message],
        before_slice: Callable[[], object] | None = None,
    ) -> None:
        """messages: from rank 0, in order
        before_slice: called before each slice; for tests
        """
        self._program = program
        self._reader = reader
        self._word = word
        self._messages = messages
        self._before_slice = before_slice
        self._passes: dict[int, ProgramState] = {}
        """Begun and unfinished, by pass id."""

    def follow(self) -> None:
        """Until the process ends. Raises RankError if this rank is not where rank 0 left a run."""
        while True:
            kind, body = self._messages.get()
            run = body if kind is Kind.RUN else None
            if run is None:
                self._forget(kind, body)
            while run is not None:
                run = self._run(*run)

    def _run(self, run_id: int, pass_id: int, new: list[Any] | None) -> list[Any] | None:
        """A run of a new pass, or of one that was left. Returns the next one, if it is known."""
        if new is not None:
            self._passes[pass_id] = self._reader.read(new).start(self._program)
        state = self._passes[pass_id]
        run = _Run(run_id, self._word, self._messages, self._forget)
        while not state.is_done and run.may_go_on():
            self._run_to_boundary(state)
            run.boundary += 1
        if state.is_done:
            del self._passes[pass_id]
        return run.next_run

    def _run_to_boundary(self, state: ProgramState) -> None:
        while not state.is_done:
            if self._before_slice:
                self._before_slice()
            if state.run_slice():
                return

    def _forget(self, kind: Kind, body: int) -> None:
        if kind is Kind.FORGET_PASS:
            self._passes.pop(body, None)
        elif kind is Kind.FORGET_TABLE:
            self._reader.forget_table(body)
        else:
            raise RankError(f"rank 0 sends {kind.value!r} to a rank that runs nothing")


class _Run:
    """Where this rank stands in a run, and how far it may go."""

    def __init__(
        self,
        run_id: int,
        word: StopWord,
        messages: queue.SimpleQueue[Message],
        forget: Callable[[Kind, int], None],
    ) -> None:
        self.boundary = 0
        self.next_run: list[Any] | None = None
        """Body of its message, if that came meanwhile."""
        self._run_id = run_id
        self._word = word
        self._messages = messages
        self._forget = forget
        self._end: int | None = None
        """Boundary at which rank 0 left the run, once that is known; beyond all if it did not."""

    def may_go_on(self) -> bool:
        """Wait until it is known whether the run goes on behind this boundary. Raises RankError if
        it ended before it."""
        num_looks = 0
        while True:
            stop = self._end
            if stop is None:
                run_id, published = self._word.read()
                stop = published if run_id == self._run_id else None
            if stop is not None and self.boundary > stop:
                raise RankError(
                    f"too late: at boundary {self.boundary} of run {self._run_id}, which must be "
                    f"left at boundary {stop}"
                )
            if stop is not None and self.boundary < stop:
                return True
            if self._end is not None:
                return False
            num_looks += 1
            self._listen(0.0 if num_looks < _LOOKS else _PAUSE_S)

    def _listen(self, pause_s: float) -> None:
        """Take in a message, or pause if there is none."""
        if self._messages.empty():
            # not get(timeout=..): where so short a time is over before the wait begins, CPython
            # 3.11 takes what is left of it, a negative time, for no limit
            time.sleep(pause_s)
            return
        kind, body = self._messages.get()
        if kind is Kind.LEFT:
            run_id, boundary = body
            assert run_id == self._run_id, f"run {run_id} is left within run {self._run_id}"
            self._end = boundary
        elif kind is Kind.RUN:  # of another pass: rank 0 is done with this one
            self._end, self.next_run = MAX_BOUNDARY + 1, body
        else:
            self._forget(kind, body)
