"""Rank 0: runs passes, and has the other ranks run the same slices in the same order.

Before rank 0 runs towards a boundary it publishes it in the StopWord; the others run as far and
wait there for more. So rank 0 may leave a pass at each boundary that it reaches, without asking
anybody: no other rank is, or will be, further. One boundary ahead is enough, as a quick rank waits
instead of running past, and it is what keeps the blocking time that of one rank: with two, a pass
would go on for another slice after it should be left.

What is left where goes through the channels: a rank that is behind learns there how far to go.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flowprefill.granularity import Granularity
from flowprefill.interrupt import Interrupt
from flowprefill.parallel.errors import RankError
from flowprefill.parallel.messages import NewPass, PassWriter
from flowprefill.parallel.ranks import Ranks
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.program import ProgramState, SequenceInput, SliceCost
from flowprefill.programs.slices import Slice
from flowprefill.wire import Kind


@dataclass
class Progress:
    """How far a pass is, for the other ranks."""

    pass_id: int
    new: NewPass | None
    """Until it is told."""
    run_id: int = 0
    """Of its last run; 0 = it has not begun."""
    boundary: int = 0
    """In that run."""
    is_done: bool = False


class LeadingProgram(DecoderProgram):
    """A program that is run by all ranks; its operators are those of rank 0."""

    def __init__(self, program: DecoderProgram, ranks: Ranks) -> None:
        super().__init__(program.spec, program.operators, program.limits)
        self._ranks = ranks
        self._writer = PassWriter(lambda table: ranks.send(Kind.FORGET_TABLE, table))
        self._pass_ids = itertools.count(1)
        self._run_ids = itertools.count(1)
        self._running: Progress | None = None
        # a pass may be dropped by any thread, also by garbage collection within go_on
        self._lock = threading.RLock()

    def prefill(self, inputs: Sequence[SequenceInput], granularity: Granularity) -> LeadingState:
        """See Program."""
        state = super().prefill(inputs, granularity)
        return self._lead(state, NewPass(inputs, granularity, self.limits))

    def decode(self, inputs: Sequence[SequenceInput]) -> LeadingState:
        """See Program."""
        return self._lead(super().decode(inputs), NewPass(inputs, None, self.limits))

    def _lead(self, state: ProgramState, new: NewPass) -> LeadingState:
        progress = Progress(next(self._pass_ids), new)
        leading = LeadingState(self, state, progress)
        # a cancelled request's pass is dropped somewhere; the others must not keep theirs
        ending = weakref.finalize(leading, self._forget, progress)
        ending.atexit = False
        return leading

    def go_on(self, progress: Progress) -> None:
        """Let the others run the pass to the next boundary. Raises RankError if one is gone."""
        self._ranks.check()
        if self._running is not progress:
            with self._lock:
                self._leave_running()
                self._begin(progress)
        self._ranks.word.publish(progress.run_id, progress.boundary + 1)

    def _begin(self, progress: Progress) -> None:
        """A run of its pass."""
        progress.run_id, progress.boundary = next(self._run_ids), 0
        new = progress.new and self._writer.write(progress.new)
        progress.new = None
        self._ranks.send(Kind.RUN, [progress.run_id, progress.pass_id, new])
        self._running = progress

    def end(self, progress: Progress) -> None:
        """The pass is done, which the others see for themselves."""
        progress.is_done = True
        self._running = None

    def check(self) -> None:
        """Raises RankError if a rank is gone."""
        self._ranks.check()

    def explain(self, error: RankError) -> RankError:
        """See Ranks."""
        return self._ranks.explain(error)

    def _leave_running(self) -> None:
        """Whatever ran is left where it is."""
        running, self._running = self._running, None
        if running:
            self._ranks.send(Kind.LEFT, [running.run_id, running.boundary])

    def _forget(self, progress: Progress) -> None:
        """Nobody goes on with the pass."""
        if progress.is_done or not progress.run_id:
            return  # it is not known to the others any more, or not yet
        with self._lock:
            if self._running is progress:
                self._leave_running()
            self._ranks.send(Kind.FORGET_PASS, progress.pass_id)


class LeadingState:
    """Rank 0's part of a pass. Implements ProgramState."""

    def __init__(self, program: LeadingProgram, state: ProgramState, progress: Progress) -> None:
        self._program = program
        self._state = state
        self._progress = progress

    @property
    def is_done(self) -> bool:
        return self._state.is_done

    @property
    def next_slice(self) -> Slice:
        return self._state.next_slice

    @property
    def logits(self) -> Tensor:
        """See ProgramState. Raises RankError if a rank is gone, and the sums perhaps wrong."""
        self._program.check()
        return self._state.logits

    @property
    def live_bytes(self) -> int:
        """Of one rank."""
        return self._state.live_bytes

    def remaining_s(self, cost: SliceCost) -> float:
        return self._state.remaining_s(cost)

    def run_slice(self, interrupt: Interrupt | None = None) -> bool:
        """See ProgramState; one slice. Raises RankError if a rank is gone."""
        self._program.go_on(self._progress)
        try:
            may_leave = self._state.run_slice()
        except RankError as error:
            raise self._program.explain(error) from error
        if self._state.is_done:
            self._program.end(self._progress)
        elif may_leave:
            self._progress.boundary += 1
        return may_leave
