"""The open loop, in virtual time: when requests are sent, and what becomes of each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from flowprefill.replay.errors import TargetError
from flowprefill.replay.plan import PlannedRequest, plan_replay
from flowprefill.replay.records import ReplayRecord
from flowprefill.replay.run import Replayer
from flowprefill.replay.targets import Part
from flowprefill.workload import Objective, read_trace, window
from tests.unit.replay.virtual_loop import VirtualLoop, run_virtually

GOAL = Objective("text", 0.25, 0.1)
TRACES = Path(__file__).parents[3] / "clients" / "traces"
Answer = Callable[[int], AsyncIterator[Part]]


@dataclass
class Server:
    """Answers each request as `answer` says; a message is the request's id."""

    answer: Answer
    sent_s: dict[int, float] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)

    async def check(self) -> None: ...

    async def close(self) -> None: ...

    def prepare(self, planned: PlannedRequest, prompt: str) -> int:
        return planned.req_id

    async def send(self, message: int) -> AsyncIterator[Part]:
        self.sent_s[message] = asyncio.get_running_loop().time()
        try:
            async for part in self.answer(message):
                yield part
        except asyncio.CancelledError:
            self.cancelled.append(message)
            raise


def parts(*gaps_s: float) -> Answer:
    async def answer(req_id: int) -> AsyncIterator[Part]:
        for gap_s in gaps_s:
            await asyncio.sleep(gap_s)
            yield Part(1)

    return answer


def plan_of(*due_s: float) -> list[PlannedRequest]:
    return [PlannedRequest(i, time_s, 10, 3, GOAL) for i, time_s in enumerate(due_s)]


def replay(
    server: Server,
    plan: Sequence[PlannedRequest],
    timeout_s: float = 1e6,
    stop_after_s: float | None = None,
    cut_idle: bool = False,
) -> list[ReplayRecord]:
    async def main() -> list[ReplayRecord]:
        replayer = Replayer(server, timeout_s, cut_idle=cut_idle)
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, replayer.stop)
        return await replayer.run(plan, [planned.req_id for planned in plan])

    return run_virtually(main())


def test_requests_are_sent_when_due_though_none_is_answered_for_an_hour() -> None:
    plan = plan_replay(window(read_trace(TRACES / "azure2023_mixed_20min.csv"), 100, 500))
    server = Server(parts(3600.0))
    records = replay(server, plan)
    assert [record.planned for record in records] == plan
    for record in records:
        assert record.sent_s == pytest.approx(record.planned.due_s, abs=1e-6)
        assert record.ttft_s == pytest.approx(3600.0)
    # and the gaps are those of the trace, on the server's side too
    gaps = [b - a for a, b in itertools.pairwise(server.sent_s.values())]
    assert gaps == pytest.approx([b.due_s - a.due_s for a, b in itertools.pairwise(plan)], abs=1e-6)


def test_what_is_due_at_once_is_sent_at_once() -> None:
    server = Server(parts(5.0))
    records = replay(server, plan_of(0.0, 0.0, 0.0, 3.0, 3.0))
    assert [r.send_lag_s for r in records] == pytest.approx([0.0] * 5, abs=1e-6)
    assert list(server.sent_s) == [0, 1, 2, 3, 4]


def test_a_client_that_is_busy_sends_late_and_says_so() -> None:
    async def answer(req_id: int) -> AsyncIterator[Part]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.pass_time(0.04)
        yield Part(1)

    records = replay(Server(answer), plan_of(0.0, 0.01, 0.02, 1.0))
    lags = [record.send_lag_s for record in records]
    assert lags == pytest.approx([0.0, 0.03, 0.06, 0.0], abs=1e-3)


def test_idle_time_is_cut_and_only_that() -> None:
    server = Server(parts(0.5))
    records = replay(server, plan_of(0.0, 100.0, 100.2, 101.0, 900.0), cut_idle=True)
    assert [r.send_lag_s for r in records] == pytest.approx([0.0] * 5, abs=1e-6)
    assert [r.ttft_s for r in records] == pytest.approx([0.5] * 5)
    gaps = [b - a for a, b in itertools.pairwise(server.sent_s.values())]
    # 50 ms after the server has nothing to do, but never before it is due
    assert gaps == pytest.approx([0.55, 0.2, 0.55, 0.55], abs=1e-6)


def test_tokens_are_stamped_as_they_come() -> None:
    (record,) = replay(Server(parts(0.2, 0.05, 0.05)), plan_of(0.0))
    assert record.ttft_s == pytest.approx(0.2)
    assert record.times.tbt_s == pytest.approx([0.05, 0.05])
    assert record.ended_s == pytest.approx(0.3)
    assert record.is_on_time


def test_the_server_s_own_count_of_tokens_is_believed() -> None:
    async def answer(req_id: int) -> AsyncIterator[Part]:
        await asyncio.sleep(0.1)
        yield Part(1)
        await asyncio.sleep(0.1)
        yield Part(1)
        yield Part(0, num_input_tokens=11, total_tokens=(1, 5)[req_id], server_ttft_s=0.08)

    few, many = replay(Server(answer), plan_of(0.0, 1.0))
    assert [len(few.token_s), len(many.token_s)] == [1, 5]
    assert many.times.tbt_s == pytest.approx([0.1, 0, 0, 0])
    assert few.num_input_tokens == 11
    assert few.server_ttft_s == 0.08


def test_a_failure_is_one_request_s_and_its_tokens_are_kept() -> None:
    async def answer(req_id: int) -> AsyncIterator[Part]:
        yield Part(1)
        if req_id == 1:
            raise TargetError("UNAVAILABLE", "gone")

    first, second, third = replay(Server(answer), plan_of(0.0, 0.1, 0.2))
    assert (first.error, second.error, third.error) == (None, "UNAVAILABLE: gone", None)
    assert len(second.token_s) == 1
    assert not second.is_on_time


def test_a_request_without_end_is_given_up() -> None:
    server = Server(parts(0.1, 50.0))
    (record,) = replay(server, plan_of(0.0), timeout_s=2.0)
    assert record.error == "TIMEOUT: no end within 2 s"
    assert record.ended_s == pytest.approx(2.0)
    assert server.cancelled == [0]


@pytest.mark.parametrize("stop_after_s", [2.0, 6.0])
def test_stopped_it_cancels_what_runs_and_keeps_what_is_complete(stop_after_s: float) -> None:
    async def answer(req_id: int) -> AsyncIterator[Part]:
        await asyncio.sleep(1e5 if req_id == 1 else 0.5)
        yield Part(1)

    server = Server(answer)
    records = replay(server, plan_of(0.0, 1.0, 5.0), stop_after_s=stop_after_s)
    assert [r.planned.req_id for r in records] == [0] if stop_after_s < 5 else [0, 2]
    assert server.cancelled == [1]
    assert len(server.sent_s) == (2 if stop_after_s < 5 else 3)


def test_stopped_before_it_began_it_sends_nothing() -> None:
    async def main() -> list[ReplayRecord]:
        replayer = Replayer(Server(parts(1.0)), 10.0)
        replayer.stop()
        return await replayer.run(plan_of(0.0), [0])

    assert run_virtually(main()) == []


def test_a_fault_of_ours_ends_the_replay() -> None:
    async def answer(req_id: int) -> AsyncIterator[Part]:
        yield Part(1)
        raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        replay(Server(answer), plan_of(0.0, 0.1))
