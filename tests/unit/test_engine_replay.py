"""A plan replayed on a real engine with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from flowprefill.bench.engine_replay import EngineReplayer
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.records import ReplayRecord
from flowprefill.workload import Objective
from tests.factories import write_tiny_model

GOAL = Objective("text", 10.0, 10.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def replayer() -> EngineReplayer:
    return EngineReplayer(seed=0)


@pytest.fixture
def engine(model: Path, replayer: EngineReplayer) -> Iterator[Engine]:
    config = EngineConfig(model=str(model), device="cpu", num_threads=1)
    engine = Engine(config, replayer.on_output)
    yield engine
    engine.close()


def planned(*due_s: float, input_tokens: int = 20, output_tokens: int = 3) -> list[PlannedRequest]:
    return [
        PlannedRequest(i, time_s, input_tokens, output_tokens, GOAL)
        for i, time_s in enumerate(due_s)
    ]


def test_each_is_sent_when_due_and_answered_in_full(
    replayer: EngineReplayer, engine: Engine
) -> None:
    plan = planned(0.0, 0.0, 0.05, 0.06)
    records = replayer.run(engine, plan)
    assert [record.planned for record in records] == plan
    for record in records:
        assert record.error is None
        assert len(record.token_s) == 3
        assert record.planned.due_s <= record.sent_s < record.token_s[0] <= record.token_s[-1]


def test_idle_time_is_cut_and_the_records_do_not_show_it(
    replayer: EngineReplayer, engine: Engine
) -> None:
    """An hour between requests, which the test does not wait for."""
    plan = planned(1000.0, 4600.0, 4600.01, 8200.0)
    records = replayer.run(engine, plan, cut_idle=True)
    for record in records:
        assert record.planned.due_s <= record.sent_s < record.planned.due_s + 5
        assert 0 < record.ttft_s < 5


def test_it_stops_when_told_and_waits_for_what_was_sent(
    replayer: EngineReplayer, engine: Engine
) -> None:
    ended: list[ReplayRecord] = []

    def go_on(new: Sequence[ReplayRecord]) -> bool:
        ended.extend(new)
        return len(ended) < 2

    records = replayer.run(engine, planned(*range(0, 9000, 1000)), cut_idle=True, go_on=go_on)
    assert len(records) == 2
    assert all(len(record.token_s) == 3 for record in records)


def test_what_is_refused_is_in_the_records(replayer: EngineReplayer, engine: Engine) -> None:
    too_long = planned(0.0, input_tokens=100_000)
    (record,) = replayer.run(engine, too_long)
    assert record.error is not None and record.error.startswith("INVALID_ARG")
    assert not record.is_on_time


@pytest.mark.parametrize("block_tokens", [16, 512])
def test_equal_hashes_make_equal_blocks(replayer: EngineReplayer, block_tokens: int) -> None:
    end = 2 * block_tokens
    plans = [
        PlannedRequest(0, 0.0, end + 12, 1, GOAL, (7, 8, 9), block_tokens),
        PlannedRequest(1, 0.0, end + 16, 1, GOAL, (7, 8, 10), block_tokens),
    ]
    first, second = (replayer._prompt(one, vocab_size=256) for one in plans)
    assert (len(first), len(second)) == (end + 12, end + 16)
    assert first[:end] == second[:end]
    assert first[end:] != second[end : end + 12]


def test_equal_hashes_of_two_replays_share_nothing(
    replayer: EngineReplayer, engine: Engine
) -> None:
    plan = [PlannedRequest(i, 1000.0 * i, 40, 1, GOAL, (7, 8, 9), 16) for i in range(2)]
    found = [0]
    for _ in range(2):
        replayer.run(engine, plan, cut_idle=True)
        found.append(engine.stats().num_cached_tokens)
    assert found[1] > 0
    assert found[2] == 2 * found[1]


def test_one_replay_after_the_other(replayer: EngineReplayer, engine: Engine) -> None:
    for _ in range(2):
        assert len(replayer.run(engine, planned(0.0, 0.01))) == 2
    assert replayer.run(engine, []) == []
