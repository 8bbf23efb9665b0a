"""A planned replay on an engine in this process: open loop, each request at its own time.

The engine is the one that a server runs, with all of its threads; what is left out is the way
through tritonserver. Prompts are random token ids; those of a trace with prefix hashes share what
these say with others of the same replay, and nothing with those of another.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flowprefill.bench.report import BenchmarkError
from flowprefill.engine import Engine
from flowprefill.errors import FlowPrefillError
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.records import ReplayRecord
from flowprefill.request import SLO, FinishReason, Request, TokenOutput
from flowprefill.sampling_params import SamplingParams

_SILENCE_S = 300.0
"""An engine that ends no request for so long will end none."""
_LEAD_S = 0.02
"""Time before the first request, and before one that comes after idle time that was cut."""


@dataclass
class _Live:
    """One request in the making."""

    planned: PlannedRequest
    origin_s: float
    """When the plan's second 0 was, on the monotonic clock."""
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    blocking_s: float | None = None
    error: str | None = None

    def record(self) -> ReplayRecord:
        times = tuple(time_s - self.origin_s for time_s in self.token_s)
        sent_s = self.sent_s - self.origin_s
        return ReplayRecord(self.planned, sent_s, times, self.error, blocking_s=self.blocking_s)


class EngineReplayer:
    """Sends plans to an engine, one after the other. Give `on_output` to the engine."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._live: dict[int, _Live] = {}
        self._ended: list[_Live] = []
        self._next_id = 1
        self._num_replays = 0

    def on_output(self, output: TokenOutput) -> None:
        """Called on the engine's threads."""
        with self._changed:
            live = self._live[output.req_id]
            if output.token_id is not None:
                live.token_s.append(output.token_s)
            if output.prefill is not None:
                live.blocking_s = output.prefill.blocking_s
            if output.finish_reason is None:
                return
            if output.finish_reason is FinishReason.ERROR:
                live.error = f"{output.error_code}: {output.error_message}"
            self._end(output.req_id)

    def run(
        self,
        engine: Engine,
        plan: Sequence[PlannedRequest],
        cut_idle: bool = False,
        go_on: Callable[[Sequence[ReplayRecord]], bool] = lambda ended: True,
    ) -> list[ReplayRecord]:
        """Send all, wait for all answers; records in the order of the plan.

        cut_idle: while the engine has nothing to do, go straight to the next request. An idle
            engine changes nothing, so TTFTs are those of the whole trace in less time.
        go_on(records of what has ended since it was last asked): asked before each request on this
            thread; False sends nothing more, and the records are of what was sent
        Raises BenchmarkError if the engine ends nothing for minutes.
        """
        self._num_replays += 1
        requests = [self._make_request(planned, engine.info.vocab_size) for planned in plan]
        records: list[ReplayRecord] = []
        origin_s = time.monotonic() + _LEAD_S - (plan[0].due_s if plan else 0.0)
        for planned, request in zip(plan, requests, strict=True):
            origin_s = self._wait_until_due(planned.due_s, origin_s, cut_idle)
            new = self._take_ended()
            records += new
            if not go_on(new):
                break
            self._send(engine, planned, request, origin_s)
        records += self._wait_for_all()
        return sorted(records, key=lambda record: record.planned.req_id)

    def _make_request(self, planned: PlannedRequest, vocab_size: int) -> Request:
        sampling = SamplingParams(
            max_tokens=planned.output_tokens, temperature=0.0, ignore_eos=True
        )
        goal = planned.objective
        slo = SLO(goal.ttft_s, goal.tbt_s, goal.name)
        req_id, self._next_id = self._next_id, self._next_id + 1
        return Request(req_id, self._prompt(planned, vocab_size), sampling, slo, 0.0)

    def _prompt(self, planned: PlannedRequest, vocab_size: int) -> list[int]:
        """Random token ids; blocks of equal hashes at the same place of one replay are equal."""
        tokens: list[int] = []
        for block_hash in planned.prefix_hashes:
            block = random.Random(f"{self._num_replays} {block_hash}")
            tokens += [block.randrange(vocab_size) for _ in range(planned.block_tokens)]
        num_more = max(0, planned.input_tokens - len(tokens))
        tokens += [self._rng.randrange(vocab_size) for _ in range(num_more)]
        return tokens[: planned.input_tokens]

    def _wait_until_due(self, due_s: float, origin_s: float, cut_idle: bool) -> float:
        """Wait for that second of the plan; returns its second 0, later if idle time was cut."""
        while (left_s := origin_s + due_s - time.monotonic()) > 0:
            with self._changed:
                if not cut_idle or self._live:
                    self._changed.wait(left_s)  # an end may leave the engine idle
                    continue
            if left_s <= _LEAD_S:
                time.sleep(left_s)
            else:
                origin_s -= left_s - _LEAD_S
        return origin_s

    def _send(
        self, engine: Engine, planned: PlannedRequest, request: Request, origin_s: float
    ) -> None:
        sent_s = time.monotonic()
        live = _Live(planned, origin_s, sent_s)
        with self._changed:
            self._live[request.req_id] = live
        try:
            engine.submit(replace(request, arrival_s=sent_s))
        except FlowPrefillError as error:
            with self._changed:
                live.error = f"{error.code}: {error}"
                self._end(request.req_id)

    def _end(self, req_id: int) -> None:
        self._ended.append(self._live.pop(req_id))
        self._changed.notify_all()

    def _take_ended(self) -> list[ReplayRecord]:
        with self._changed:
            ended, self._ended = self._ended, []
        return [live.record() for live in ended]

    def _wait_for_all(self) -> list[ReplayRecord]:
        records: list[ReplayRecord] = []
        while True:
            with self._changed:
                if self._live and not self._changed.wait_for(lambda: self._ended, _SILENCE_S):
                    raise BenchmarkError(f"the engine ended no request in {_SILENCE_S:.0f} s")
                is_over = not self._live
            records += self._take_ended()
            if is_over:
                return records
