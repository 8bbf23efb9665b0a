"""The measuring part of `flowprefill bench servers`: replays through one server at a time.

Each server gets the same prompts at the same times, over its own protocol, from the open-loop
client of `flowprefill replay`; nothing else runs meanwhile. Idle time is cut out, and times of
replays are those of the machine at the speed of its profile (pace.py).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from flowprefill.bench.goodput_outcomes import (
    Outcome,
    OutcomeStore,
    Point,
    outcome_of,
    was_sent_late,
)
from flowprefill.bench.goodput_plan import GoodputPlan
from flowprefill.bench.pace import Pace, Stopped
from flowprefill.bench.progress import BenchProgress
from flowprefill.bench.report import BenchmarkError
from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.replay.prompts import PromptMaker
from flowprefill.replay.records import ReplayRecord
from flowprefill.replay.run import Replayer
from flowprefill.replay.targets import Target
from flowprefill.workload import Objective

MOMENTS = (0.1, 0.5, 0.9)
"""When the short prompt arrives, as a fraction of the long one's solo TTFT."""
SHORT_TOKENS, LONG_TOKENS = 64, 7500
SHORT_SLO_S, LONG_SLO_S = 0.4, 60.0
TBT_SLO_S = 0.2
_WARM_UP_TOKENS = (64, 1024, 2048, 64)
_TIMEOUT_S = 600.0
_MAX_TRIES = 3
"""For a short prompt to arrive before the long one is done, on a machine with noise."""


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    version: str
    make_target: Callable[[], Target[Any]]
    """In the event loop that it is for."""
    stats: Callable[[], dict[str, Any]] | None = None
    """The engine's counters; None where there are none to be had."""
    stopped: Stopped = contextlib.nullcontext
    """See Pace.replay; ours sleeps when it is idle."""


@dataclass(frozen=True)
class Contender:
    """A server to measure."""

    name: str
    start: Callable[[], AbstractContextManager[Running]]
    guesses: tuple[float, float]
    """The loads expected to be its highest: overall, and with every class."""
    settings: str = ""
    """What its outcomes depend on and its name need not say."""

    @property
    def key(self) -> str:
        """Under which outcomes are kept."""
        return f"{self.name} {self.settings}".rstrip()


class ServerRuns:
    """Measures servers, each point once; with a file, also across calls of the command."""

    def __init__(
        self,
        plan: GoodputPlan,
        maker: PromptMaker,
        progress: BenchProgress,
        store: OutcomeStore,
        pace: Pace,
    ) -> None:
        self._plan = plan
        self._pace = pace
        self._maker = maker
        self._progress = progress
        self._store = store
        self._server: tuple[Contender, Running] | None = None
        self._stack = contextlib.ExitStack()
        self._num_extra = 0
        progress.describe("making prompts")
        planned = plan_replay(plan.window.requests, plan.window.objectives)
        self._prompts = [maker.make(p) for p in planned]
        self.versions: dict[str, str] = {}
        """Of servers that were started."""

    def measure(self, contender: Contender, load: float) -> list[Outcome]:
        """The outcome of each block."""
        point = Point(contender.key, load)
        return self._once(point, lambda: self._replay(contender, load))

    def meet(self, contender: Contender, rounds: int) -> list[Outcome]:
        """A short prompt behind a long one: an outcome of each round, with the classes
        `short alone`, `long alone`, and `short at 10%`, `long at 10%` and so on."""
        point = Point(f"{contender.key}, short behind long, {rounds} rounds", 0.0)
        return self._once(point, lambda: [self._round(contender) for _ in range(rounds)])

    def close(self) -> None:
        """End the server that runs."""
        self._server = None
        self._stack.close()

    def _once(self, point: Point, measure: Callable[[], list[Outcome]]) -> list[Outcome]:
        found = self._store.outcomes.get(point)
        if found is None:
            found = measure()
            self._store.add(point, found)
            self._progress.advance()
        return found

    def _replay(self, contender: Contender, load: float) -> list[Outcome]:
        running = self._running(contender)
        self._progress.describe(f"{contender.name} at load {load:.3g}")
        replay = partial(self._replayed, running, load)
        paced = self._pace.replay(replay, running.stopped, was_sent_late)
        paced.value[0].drift = paced.drift
        return paced.value

    def _replayed(self, running: Running, load: float, slowdown: float) -> list[Outcome]:
        before = running.stats() if running.stats else {}
        planned = plan_replay(*self._plan.offered(load, slowdown=slowdown))
        records = _send(running, planned, self._prompts)
        after = running.stats() if running.stats else {}
        outcomes = [outcome_of(block, slowdown) for block in self._plan.blocks(records)]
        for name in ("num_preemptions", "num_decisions"):
            setattr(outcomes[0], name, after.get(name, 0) - before.get(name, 0))
        return outcomes

    def _round(self, contender: Contender) -> Outcome:
        running = self._running(contender)
        self._progress.describe(f"{contender.name}: short behind long")
        alone = Objective("long alone", LONG_SLO_S, TBT_SLO_S)
        records = self._send_new(running, [(0.0, LONG_TOKENS, alone)])
        long_s = records[0].ttft_s
        for moment in MOMENTS:
            alone = Objective("short alone", SHORT_SLO_S, TBT_SLO_S)
            records += self._send_new(running, [(0.0, SHORT_TOKENS, alone)])
            records += self._encounter(running, moment, long_s)
        return outcome_of(records)

    def _encounter(self, running: Running, moment: float, long_s: float) -> list[ReplayRecord]:
        """long_s: TTFT of the long prompt alone"""
        long_goal = Objective(f"long at {moment:.0%}", LONG_SLO_S, TBT_SLO_S)
        short_goal = Objective(f"short at {moment:.0%}", SHORT_SLO_S, TBT_SLO_S)
        for _ in range(_MAX_TRIES):
            both = [(0.0, LONG_TOKENS, long_goal), (moment * long_s, SHORT_TOKENS, short_goal)]
            long, short = self._send_new(running, both)
            if short.sent_s < long.token_s[0]:
                return [long, short]
            long_s = long.ttft_s  # undisturbed, and as fast as the machine is now
        raise BenchmarkError(
            f"{_MAX_TRIES} times the long prompt was done before {moment:.0%} of its usual time: "
            "the machine is too noisy"
        )

    def _send_new(
        self, running: Running, requests: Sequence[tuple[float, int, Objective]]
    ) -> list[ReplayRecord]:
        """Requests as (due_s, tokens, objective), with prompts that were never sent before."""
        planned = []
        for due_s, num_tokens, goal in requests:
            req_id = len(self._prompts) + self._num_extra
            self._num_extra += 1
            planned.append(PlannedRequest(req_id, due_s, num_tokens, 1, goal))
        return _send(running, planned, [self._maker.make(p) for p in planned])

    def _running(self, contender: Contender) -> Running:
        """One server at a time runs; warmed up."""
        if self._server is None or self._server[0] != contender:
            self.close()
            self._progress.describe(f"starting {contender.name}")
            running = self._stack.enter_context(contender.start())
            self.versions[contender.name] = running.version
            self._server = contender, running
            goal = Objective("warm-up", LONG_SLO_S, TBT_SLO_S)
            for num_tokens in _WARM_UP_TOKENS:
                self._send_new(running, [(0.0, num_tokens, goal)])
        return self._server[1]


def _send(
    running: Running, planned: Sequence[PlannedRequest], prompts: Sequence[str]
) -> list[ReplayRecord]:
    """Replay it. Raises BenchmarkError if a request failed or was not the one that was meant."""

    async def replay() -> list[ReplayRecord]:
        target = running.make_target()
        try:
            messages = [target.prepare(p, text) for p, text in zip(planned, prompts, strict=True)]
            return await Replayer(target, _TIMEOUT_S, cut_idle=True).run(planned, messages)
        finally:
            await target.close()

    records = asyncio.run(replay())
    for record in records:
        asked = record.planned
        if record.error:
            raise BenchmarkError(f"{running.version}: a request failed: {record.error}")
        if record.num_input_tokens != asked.input_tokens:
            raise BenchmarkError(
                f"{running.version}: a prompt of {asked.input_tokens} tokens has "
                f"{record.num_input_tokens} on the server"
            )
        if len(record.token_s) != asked.output_tokens:
            raise BenchmarkError(
                f"{running.version}: {len(record.token_s)} tokens came, not {asked.output_tokens}"
            )
    return records
