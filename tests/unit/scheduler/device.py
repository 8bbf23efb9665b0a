"""Device: the simulator on a device of fixed rates, which checks each decision."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from flowprefill.granularity import Granularity
from flowprefill.request import RequestStatus
from flowprefill.scheduler.events import (
    Decision,
    DecodeStep,
    DecodeStepDone,
    Event,
    Finished,
    PrefillDone,
    PrefillParked,
    PrefillTask,
)
from flowprefill.scheduler.scheduler import Scheduler
from flowprefill.simulator.simulator import RequestRecord, Simulator, Work
from tests.unit.scheduler.helpers import BLOCK_SIZE, FixedRatePredictor, SlicedTimeline

MAX_DECISIONS = 100_000
"""More than any scenario needs that comes to an end."""


@dataclass(frozen=True)
class Ran:
    """One stretch of device time."""

    req_ids: tuple[int, ...]
    is_step: bool
    start_s: float
    end_s: float


class Device(Simulator):
    """Runs a scheduler's decisions and holds each of them to what any engine relies on.

    Shared blocks are held to their contents: `_content` knows what was last written to each.
    """

    def __init__(self, scheduler: Scheduler, *, slowness: float = 1.0) -> None:
        """slowness: device time over predicted time."""
        predictor = scheduler._predictor
        assert isinstance(predictor, FixedRatePredictor)
        cost = dataclasses.replace(predictor, speed_factor=slowness)
        super().__init__(scheduler, cost, predictor, Granularity("tile"))
        self.log: list[Ran] = []
        self.decisions: list[tuple[float, Decision]] = []
        self.token_times: defaultdict[int, list[float]] = defaultdict(list)
        self.ended_at: dict[int, float] = {}  # of the rejected
        self.num_start_events = 0
        self.num_switches = 0
        self._last_prefill: int | None = None
        self._has_kv: set[int] = set()  # prefilled and not evicted since
        self._blocks_of: dict[int, dict[int, list[int]]] = {}  # by task and request
        self._content: dict[int, Hashable] = {}  # key by block id

    # ---- what scenarios ask -------------------------------------------------------------------

    @property
    def ended(self) -> dict[int, str]:
        return {r: record.ended for r, record in self.records.items() if record.ended}

    def ttft_s(self, req_id: int) -> float:
        return self.records[req_id].ttft_s

    def is_on_time(self, req_id: int) -> bool:
        record = self.records[req_id]
        return record.ttft_s <= record.arrival.ttft_slo_s + 1e-9

    def gaps(self, req_id: int, from_s: float = 0.0, to_s: float = math.inf) -> list[float]:
        """Times between two tokens, of those within a stretch of time."""
        times = [t for t in self.token_times[req_id] if from_s <= t <= to_s]
        return [b - a for a, b in itertools.pairwise(times)]

    def prefill_order(self) -> list[int]:
        """Requests in the order in which their prefills got the device, repeats merged; of a pack
        the first."""
        order: list[int] = []
        for ran in self.log:
            if not ran.is_step and order[-1:] != [ran.req_ids[0]]:
                order.append(ran.req_ids[0])
        return order

    def prefill_s(self, req_id: int, from_s: float = 0.0, to_s: float = math.inf) -> float:
        """Device time of its prefills within a stretch of time."""
        return sum(
            max(0.0, min(ran.end_s, to_s) - max(ran.start_s, from_s))
            for ran in self.log
            if not ran.is_step and req_id in ran.req_ids
        )

    def written_keys(self, req_id: int) -> tuple[Hashable, ...]:
        """Keys of its full blocks, of prompt and generated tokens whose KV was written."""
        record = self.records[req_id]
        keys, num_prompt = record.arrival.prefix_keys, record.arrival.num_prompt_tokens
        if not keys:
            return ()
        num_blocks = (num_prompt + record.num_tokens - 1) // BLOCK_SIZE
        return (*keys, *((keys, num_prompt, req_id, i) for i in range(len(keys), num_blocks)))

    # ---- the simulator's hooks ----------------------------------------------------------------

    def on_token(self, record: RequestRecord) -> None:
        self.token_times[record.arrival.req_id].append(self.now_s)

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        self.decisions.append((self.now_s, decision))
        assert len(self.decisions) < MAX_DECISIONS, "it comes to no end"
        state = (PrefillParked, DecodeStepDone)
        self.num_start_events += sum(not isinstance(event, state) for event in events)
        for event in events:
            if isinstance(event, PrefillDone):
                self._note_written(event.task_id)
        self._has_kv.difference_update(decision.evicted)
        self.scheduler.check_integrity()
        self._check_evicted(decision.evicted)
        assert decision.timer_s is None or decision.timer_s > self.now_s, "timer in the past"
        for req_id in decision.rejected:
            assert not self.token_times[req_id], f"request {req_id} is rejected after a token"
            self.ended_at[req_id] = self.now_s
        if isinstance(decision.task, PrefillTask):
            self._check_prefill(decision.task)
            if decision.steps:
                self._check_step(decision.steps.step, decision.steps.max_steps)
        elif decision.task:
            assert decision.timer_s is None and decision.steps is None
            self._check_step(decision.task, decision.max_steps)
        else:
            scheduler = self.scheduler
            num_live = scheduler.num_waiting + scheduler.num_prefilling + scheduler.num_decoding
            assert num_live == 0, "idle with work"

    def on_run(self, work: Work, from_s: float) -> None:
        assert isinstance(work.timeline, SlicedTimeline)
        start_s = self.now_s - (work.elapsed_s - from_s)
        self.log.append(Ran(work.req_ids, work.timeline.is_step, start_s, self.now_s))

    def _emit(self, req_ids: tuple[int, ...]) -> list[Event]:
        """As the engine does, name the blocks of those that end."""
        finished: list[Event] = []
        for event in super()._emit(req_ids):
            assert isinstance(event, Finished)
            keys = self.written_keys(event.req_id)
            self._content.update(zip(self.scheduler.block_ids(event.req_id), keys, strict=False))
            finished.append(Finished(event.req_id, keys))
        return finished

    # ---- checks -------------------------------------------------------------------------------

    def _check_evicted(self, evicted: Sequence[int]) -> None:
        """The holder with the first claim keeps its blocks."""
        if evicted:
            late = [r for r in self.records if self._is_late(r)]
            longest = min(late, key=self._late_since, default=None)
            gives_up = self.scheduler._policy.gives_up_late

            def claim(req_id: int) -> tuple[bool, tuple[int, float, float, int]]:
                gives_way = gives_up and req_id in late and req_id != longest
                return gives_way, self._urgency(req_id)

            holders = [r for r in self.records if self._holds_blocks(r)]
            assert min(map(claim, holders)) < min(map(claim, evicted))

    def _is_late(self, req_id: int) -> bool:
        """It should have had its first token by now."""
        record = self.records[req_id]
        is_live = self.scheduler.status(req_id) is not RequestStatus.FINISHED
        return is_live and not record.num_tokens and self._late_since(req_id)[0] < self.now_s

    def _late_since(self, req_id: int) -> tuple[float, int, float, int]:
        rank, deadline_s, arrival_s, _ = self._urgency(req_id)
        return deadline_s, rank, arrival_s, req_id

    def _holds_blocks(self, req_id: int) -> bool:
        return self.scheduler.status(req_id) not in (RequestStatus.WAITING, RequestStatus.FINISHED)

    def _urgency(self, req_id: int) -> tuple[int, float, float, int]:
        arrival = self.records[req_id].arrival
        deadline_s = arrival.arrival_s + arrival.ttft_slo_s
        return (-arrival.rank, deadline_s, arrival.arrival_s, req_id)

    def _check_prefill(self, task: PrefillTask) -> None:
        for req_id in task.req_ids:
            assert req_id not in self.ended, f"request {req_id} runs after its end"
            assert req_id not in self._has_kv, f"request {req_id} is prefilled twice"
            assert self.scheduler.status(req_id) is RequestStatus.RUNNING
        last = self._last_prefill
        if last not in (None, task.task_id) and self.scheduler.is_live(last):
            self.num_switches += 1
        self._last_prefill = task.task_id
        if task.task_id not in self._blocks_of:
            self._blocks_of[task.task_id] = {r: self._first_blocks(r) for r in task.req_ids}

    def _first_blocks(self, req_id: int) -> list[int]:
        """Blocks of a prefill at its start; those found by its prefix hold that very text."""
        record, block_ids = self.records[req_id], self.scheduler.block_ids(req_id)
        num_input_tokens = record.arrival.num_prompt_tokens + record.num_tokens
        num_cached_tokens = self.scheduler.num_cached_tokens(req_id)
        assert num_cached_tokens < num_input_tokens <= len(block_ids) * BLOCK_SIZE
        num_cached = num_cached_tokens // BLOCK_SIZE
        assert num_cached * BLOCK_SIZE == num_cached_tokens
        found = tuple(self._content[block_id] for block_id in block_ids[:num_cached])
        assert found == record.arrival.prefix_keys[:num_cached], "shares other text"
        self._content.update(dict.fromkeys(block_ids[num_cached:]))
        return list(block_ids)

    def _note_written(self, task_id: int) -> None:
        for req_id, block_ids in self._blocks_of.pop(task_id).items():
            keys = self.records[req_id].arrival.prefix_keys
            self._content.update(zip(block_ids, keys, strict=False))
            self._has_kv.add(req_id)

    def _check_step(self, step: DecodeStep, max_steps: int) -> None:
        assert max_steps >= 1
        for req_id in step.req_ids:
            record = self.records[req_id]
            assert record.ended is None, f"request {req_id} runs after its end"
            assert req_id in self._has_kv, f"request {req_id} decodes without its KV"
            num_context_tokens = record.arrival.num_prompt_tokens + record.num_tokens - 1
            block_ids = self.scheduler.block_ids(req_id)
            room = len(block_ids) * BLOCK_SIZE - num_context_tokens
            assert room >= max_steps, f"request {req_id} decodes without room"
            # What is generated is its own: written over whatever its further blocks held.
            first = record.arrival.num_prompt_tokens // BLOCK_SIZE
            self._content.update(dict.fromkeys(block_ids[first:]))
