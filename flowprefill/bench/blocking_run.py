"""The measuring part of `flowprefill bench blocking`: urgent prompts sent into long prefills.

Moments are drawn evenly over a prefill's own time, in which the device works for it: its clock
stands while a short prompt has the device. So a prompt that prefills in a fraction of a second is
hit as evenly as one of many seconds, by as many short ones as it can take without one hitting the
next.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from flowprefill.bench.report import BenchmarkError
from flowprefill.bench.session import Session
from flowprefill.metrics import percentile
from flowprefill.request import SLO

SHORT_SLO = SLO(ttft_s=60.0, tbt_s=1.0)
"""Always feasible, however long it is blocked: work that is late anyway preempts nothing."""
LONG_SLO = SLO(ttft_s=3600.0, tbt_s=1.0)
MIN_SPACING_S = 0.1
"""Mean own time of the long prefill between two short prompts, at least."""
_SPACING_IN_BLOCKINGS = 4
"""The same in blocking times: of two prompts that wait for one boundary only the first counts, and
were that frequent, the long waits would be over-represented."""
_FIRST_MOMENTS = 5
"""In a cell's first prefill, when no blocking time is known."""
_MAX_FRUITLESS = 10
_NUM_PAIRED, _PAIRED_EVERY = 5, 4
"""The first prefills with preemptions have an undisturbed one before each, later ones share."""


@dataclass(frozen=True)
class Interrupted:
    """One long prefill that was preempted."""

    own_s: float
    """From arrival to first token, without the device time of the short prompts."""
    undisturbed_s: float
    """TTFT of the last such prefill that had the device alone."""
    blocking_s: list[float]
    """Of each short prompt that preempted it."""


@dataclass
class Cell:
    """Everything measured at one granularity and length."""

    undisturbed_s: list[float] = field(default_factory=list)
    interrupted: list[Interrupted] = field(default_factory=list)

    @property
    def blocking_s(self) -> list[float]:
        return [s for one in self.interrupted for s in one.blocking_s]


class BlockingBench:
    """Sends long and short prompts to an engine that does nothing else."""

    def __init__(self, session: Session, short_tokens: int, seed: int) -> None:
        self._session = session
        self._short_tokens = short_tokens
        self._rng = random.Random(seed)

    def warm_up(self) -> None:
        """Pay for what only the first request pays for."""
        self._session.wait_end(self._session.submit(self._short_prompt(), SHORT_SLO))

    def measure(
        self, num_tokens: int, num_preemptions: int, on_preemptions: Callable[[int], None]
    ) -> Cell:
        """Prefill prompts of num_tokens until so many short ones have preempted them."""
        cell = Cell()
        num_left, num_fruitless = num_preemptions, 0
        while num_left:
            if needs_undisturbed(cell):
                cell.undisturbed_s.append(self._undisturbed_s(num_tokens))
            duration_s = median(cell.undisturbed_s[-_NUM_PAIRED:])
            moments = draw_moments(self._rng, duration_s, cell.blocking_s)
            moments = sorted(self._rng.sample(moments, min(num_left, len(moments))))
            one = self._interrupt(num_tokens, moments, cell.undisturbed_s[-1])
            if one.blocking_s:
                cell.interrupted.append(one)
            num_fruitless = 0 if one.blocking_s else num_fruitless + 1
            if num_fruitless == _MAX_FRUITLESS:
                raise BenchmarkError(
                    f"nothing was preempted in {num_fruitless} prefills of {num_tokens} tokens"
                )
            num_left -= len(one.blocking_s)
            on_preemptions(len(one.blocking_s))
        return cell

    def _undisturbed_s(self, num_tokens: int) -> float:
        prompt = self._session.random_prompt(num_tokens)
        return self._session.wait_end(self._session.submit(prompt, LONG_SLO)).ttft_s

    def _interrupt(
        self, num_tokens: int, moments: Sequence[float], undisturbed_s: float
    ) -> Interrupted:
        """Prefill one long prompt; send a short one at each moment of its own time, ascending."""
        session = self._session
        long = session.submit(session.random_prompt(num_tokens), LONG_SLO)
        blocking_s: list[float] = []
        shorts_s = 0.0
        for moment in moments:
            due_s = long.arrival_s + shorts_s + moment
            if due_s < time.monotonic():
                continue  # the one before waited, or ran, at that moment
            if session.has_ended_by(long, due_s):
                break
            short = session.wait_end(session.submit(self._short_prompt(), SHORT_SLO))
            if short.blocking_s is not None:
                blocking_s.append(short.blocking_s)
            elif long.finish_reason is not None:
                break  # it found the device free
            # not blocked: it came before the first slice of the long one
            shorts_s += short.ttft_s - (short.blocking_s or 0.0)
        own_s = session.wait_end(long).ttft_s - shorts_s
        return Interrupted(own_s, undisturbed_s, blocking_s)

    def _short_prompt(self) -> list[int]:
        return self._session.random_prompt(self._short_tokens)


def needs_undisturbed(cell: Cell) -> bool:
    """Whether the next prefill should have the device alone."""
    num_alone, num_interrupted = len(cell.undisturbed_s), len(cell.interrupted)
    return num_alone <= min(num_interrupted, _NUM_PAIRED + num_interrupted // _PAIRED_EVERY)


def draw_moments(rng: random.Random, duration_s: float, blocking_s: Sequence[float]) -> list[float]:
    """Moments of a prefill's own time, one at random in each of some equal parts of it.

    blocking_s: what has been measured so far
    """
    if blocking_s:
        spacing_s = max(MIN_SPACING_S, _SPACING_IN_BLOCKINGS * percentile(blocking_s, 90))
        num_parts = max(1, int(duration_s / spacing_s))
    else:
        num_parts = min(_FIRST_MOMENTS, max(1, int(duration_s / MIN_SPACING_S)))
    return [(part + rng.random()) * duration_s / num_parts for part in range(num_parts)]
