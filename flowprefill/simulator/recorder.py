"""RecordedReplay: a replay that keeps what ran when, for a timeline. Not for long traces: a prompt
is some hundred records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from flowprefill.scheduler.events import Decision, Event
from flowprefill.simulator.cost import Part, PartedTimeline, Timeline
from flowprefill.simulator.replay import Replay, Setup
from flowprefill.simulator.simulator import Work
from flowprefill.timeline import DeviceRun, RequestSpan, SliceGroup
from flowprefill.workload import Objective, TraceRequest

_SAME_S = 1e-9
"""Times so close are one: sums of floats differ in their last digits."""


class RecordedReplay(Replay):
    """One run over a trace, and its timeline."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        setup: Setup,
        slo_scale: float = 1.0,
        objectives: Sequence[Objective] | None = None,
    ) -> None:
        super().__init__(requests, setup, slo_scale, objectives=objectives)
        self.runs: list[DeviceRun] = []
        """What the device did, in order, without overlaps."""
        self._decided_s = 0.0

    def on_decision(self, events: Sequence[Event], decision: Decision) -> None:
        super().on_decision(events, decision)
        self._decided_s = self.now_s

    def on_run(self, work: Work, from_s: float) -> None:
        ran_s = work.elapsed_s - from_s
        if ran_s <= 0:
            return
        end_s = self.now_s
        before = self.runs[-1] if self.runs else None
        # The difference may be off in its last digits: nothing runs before it was decided.
        start_s = max(end_s - ran_s, self._decided_s, before.end_s if before else 0.0)
        groups = list(_groups(work, from_s, start_s, end_s))
        if before and _goes_on(before, work, start_s):
            before.end_s, before.is_done = end_s, work.is_done
            before.slices += groups
        else:
            self.runs.append(
                DeviceRun(work.task_id, work.req_ids, start_s, end_s, work.is_done, groups)
            )

    def request_spans(self) -> list[RequestSpan]:
        """What came of each request."""
        return [
            RequestSpan(
                record.arrival.req_id,
                name,
                record.arrival.num_prompt_tokens,
                record.arrival.arrival_s,
                record.first_token_s,
                record.arrival.arrival_s + record.arrival.ttft_slo_s,
            )
            for name, records in self.records_by_class().items()
            for record in records
        ]


def _groups(work: Work, from_s: float, start_s: float, end_s: float) -> Iterator[SliceGroup]:
    """What ran from start_s to end_s; each group begins exactly where the one before ended."""
    edge_s = start_s
    for part in _parts(work.timeline, from_s, work.elapsed_s):
        part_end_s = min(start_s + part.end_s - from_s, end_s)
        yield SliceGroup(part.group, edge_s, part_end_s, part.slice_s)
        edge_s = part_end_s


def _parts(timeline: Timeline, from_s: float, to_s: float) -> Iterable[Part]:
    """What ran in between; one part where the cost model cannot say."""
    if isinstance(timeline, PartedTimeline):
        return timeline.parts(from_s, to_s)
    return [Part("pass", from_s, to_s, to_s - from_s)]


def _goes_on(before: DeviceRun, work: Work, start_s: float) -> bool:
    """Whether the device was asked in between, but stayed with the task."""
    is_same = work.task_id is not None and before.task_id == work.task_id
    return is_same and not before.is_done and start_s - before.end_s < _SAME_S
