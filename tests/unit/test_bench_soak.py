"""What a soak is judged by. The soak itself needs a server."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flowprefill.bench.soak.asking import Answer, AnswerError, Ask
from flowprefill.bench.soak.bad_requests import (
    BAD_REQUESTS,
    COMPLETIONS,
    GENERATE,
    BadRequest,
    error_of,
)
from flowprefill.bench.soak.command import LONG_MINUTES, count_table, judge, summarise
from flowprefill.bench.soak.record import Record
from flowprefill.bench.soak.rig import Holdings, holdings_of, small_cache
from flowprefill.bench.soak.run import Rest, Soak
from flowprefill.bench.soak.traffic import Traffic, cancel_fault
from flowprefill.bench.soak.watch import Watch, growth, increase
from flowprefill.config import EngineConfig
from flowprefill.programs.model_spec import read_model_spec
from tests.factories import write_tiny_model

MB = 2**20
STUB = ("stub", 7)


def make_soak() -> Soak:
    flat, killed = Holdings(100 * MB, 40, 12), Holdings(900 * MB, 20, 5)
    watch = Watch({STUB: [flat] * 30, ("engine", 8): [killed] * 4}, [4 * MB] * 30)
    record = Record()
    record.outcomes[("chat", "answered")] = 5
    record.departures_s = [(1.0, 1.5)]
    rest = Rest({}, num_cancelled=1, num_evictions=2, num_preemptions=3)
    return Soak(record, watch, [1.0, 1.2], [4.0, 5.0], rest)


def missed(soak: Soak, minutes: float = LONG_MINUTES) -> list[str]:
    return [bar.what for bar in judge(soak, minutes) if not bar.is_met]


def test_a_soak_in_which_nothing_happened_meets_all_bars() -> None:
    soak = make_soak()
    assert missed(soak) == []
    summary = summarise(soak, judge(soak, 30.0))
    assert summary["is_met"] and summary["requests"] == {"chat": {"answered": 5}}
    assert summary["growth"] == {"stub": 0.0, "/dev/shm": 0.0}  # that engine was killed too soon
    assert summary["more_files"] == summary["more_threads"] == {"stub": 0}
    assert json.loads(json.dumps(summary)) == summary
    assert count_table(soak.record).row_count == 1


def hang(soak: Soak) -> None:
    soak.record.num_hung = 1


def change(soak: Soak) -> None:
    soak.record.num_changed = 1


def fail(soak: Soak) -> None:
    soak.record.num_wrong = 1


def lose_an_engine(soak: Soak) -> None:
    soak.record.num_without_engine = 1


def leak_a_block(soak: Soak) -> None:
    soak.rest.busy["num_kv_blocks_used"] = 1.0


def lose_a_count(soak: Soak) -> None:
    soak.rest.num_lost = -1.0


def leave_a_file(soak: Soak) -> None:
    soak.stop_problems.append("left in /dev/shm: a")


def evict_nobody(soak: Soak) -> None:
    soak.rest.num_evictions = 0


def preempt_nobody(soak: Soak) -> None:
    soak.rest.num_preemptions = 0


def miss_a_departure(soak: Soak) -> None:
    soak.record.departures_s.append((20.0, 21.0))


def leak_memory(soak: Soak) -> None:
    soak.watch.processes[STUB] = [Holdings((100 + step) * MB, 40, 12) for step in range(30)]


def leak_files(soak: Soak) -> None:
    soak.watch.processes[STUB] = [Holdings(100 * MB, 40 + step, 12) for step in range(30)]


def leak_threads(soak: Soak) -> None:
    soak.watch.processes[STUB] = [Holdings(100 * MB, 40, 12 + step) for step in range(30)]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (hang, "clients without an end"),
        (change, "controls with other bytes"),
        (fail, "answers that were wrong"),
        (lose_an_engine, "kills without a new engine"),
        (leave_a_file, "faults of the server's stop"),
        (evict_nobody, "evictions"),
        (preempt_nobody, "preemptions"),
        (miss_a_departure, "counted as cancelled, of those that surely were"),
        (leak_files, "more files of stub after warm-up"),
        (leak_threads, "more threads of stub after warm-up"),
        (leak_a_block, "gauges that are not 0 at rest"),
        (lose_a_count, "requests that the counts have lost"),
        (leak_memory, "growth of stub after warm-up"),
    ],
)
def test_whatever_goes_wrong_misses_a_bar(spoil: Callable[[Soak], None], what: str) -> None:
    soak = make_soak()
    spoil(soak)
    assert missed(soak) == [what]


def test_a_short_run_only_finds_large_leaks() -> None:
    soak = make_soak()
    soak.watch.processes[STUB] = [Holdings((100 + s // 2) * MB, 40, 12) for s in range(30)]
    assert missed(soak, minutes=2.0) == []
    assert missed(soak) == ["growth of stub after warm-up"]


def test_growth_leaves_the_warm_up_out() -> None:
    assert growth([1 * MB] * 10 + [5 * MB] * 20) == 0.0
    assert growth([5 * MB] * 20 + [6 * MB] * 10) == pytest.approx(0.2)
    assert growth([5 * MB] * 20 + [4 * MB] * 10) == pytest.approx(-0.2)
    assert increase([1] * 10 + [5] * 20) == 0
    assert increase([5] * 20 + [9] * 10) == 4


def test_growth_that_goes_on_to_the_end_is_nearly_all_of_it() -> None:
    """Of what grew behind the warm-up, the comparison of two long stretches showed half."""
    steady = [100 + step for step in range(300)]
    assert increase(steady) > 0.8 * 200


def test_a_process_is_looked_at_from_outside() -> None:
    before = holdings_of(os.getpid())
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with open(os.devnull):
        during = holdings_of(os.getpid())
    stop.set()
    thread.join()
    assert before.resident_bytes > MB
    assert during.num_files == before.num_files + 1
    assert during.num_threads == before.num_threads + 1


def test_the_cache_of_a_soak_holds_one_and_a_half_requests(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path, num_layers=2, max_len=512)
    config = EngineConfig(str(model), max_model_len=128, dtype="float32", device="cpu")
    spec = read_model_spec(model)
    assert small_cache(config).kv_cache_memory_bytes == 192 * 2 * 2 * spec.kv_size * 4


# ---- what clients find wrong --------------------------------------------------------------------


def make_traffic() -> Traffic:
    return Traffic(None, str, [], 5.0, seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [ValueError("no JSON"), KeyError("usage"), ConnectionResetError(), AnswerError("bad")]
)
def test_any_failure_of_a_request_is_wrong_and_ends_no_client(error: Exception) -> None:
    async def fail() -> str:
        raise error

    traffic = make_traffic()
    asyncio.run(traffic._do("chat", fail))
    assert traffic.record.num_wrong == 1
    assert len(traffic.record.problems) == 1
    assert not traffic.record.outcomes


def test_a_request_that_its_engine_took_with_it_is_lost_and_not_wrong() -> None:
    async def fail() -> str:
        raise AnswerError("the engine process died")

    traffic = make_traffic()
    traffic.record.kill_times_s.append(time.monotonic())
    asyncio.run(traffic._do("chat", fail))
    assert traffic.record.num_wrong == 0
    assert traffic.record.outcomes == {("chat", "lost"): 1}


def test_an_answer_of_fewer_tokens_is_wrong() -> None:
    async def way(ask: Ask) -> Answer:
        return Answer("text", ask.max_tokens - 1)

    ask = Ask("Hello", 8, {}, {})
    with pytest.raises(AnswerError, match="7 tokens where 8 were asked for"):
        asyncio.run(make_traffic()._answer(ask, way))


@pytest.mark.parametrize(
    ("was_found", "was_cancelled", "is_surely_live", "fault"),
    [
        (None, False, True, None),  # it left by itself
        (True, True, True, None),
        (True, False, False, None),  # the last token was on its way
        (False, False, False, None),  # it was over, or had not come
        (False, False, True, "found nothing"),
        (True, False, True, "answered in full"),
        (False, True, False, "ended as cancelled"),
    ],
)
def test_what_a_cancellation_by_id_says_is_held_against_what_it_did(
    was_found: bool | None, was_cancelled: bool, is_surely_live: bool, fault: str | None
) -> None:
    found = cancel_fault(was_found, was_cancelled, is_surely_live)
    assert (found is None) if fault is None else (fault in (found or ""))


def test_departures_around_a_kill_may_have_ended_otherwise() -> None:
    record = Record(departures_s=[(1.0, 2.0), (10.0, 11.0), (20.0, 21.0), (30.0, 31.0)])
    record.kill_times_s = [10.5, 22.0]
    assert record.num_surely_cancelled == 2


@pytest.mark.parametrize(
    ("route", "status", "text", "is_refused"),
    [
        (COMPLETIONS, 400, '{"error": {"message": "top_p: 7"}}', True),
        (COMPLETIONS, 500, '{"error": {"message": "top_p: 7"}}', False),
        (COMPLETIONS, 200, '{"error": {"message": "top_p: 7"}}', False),
        (COMPLETIONS, 400, '{"error": {"message": "bad"}}', False),
        (COMPLETIONS, 400, "top_p", False),
        (GENERATE, 500, '{"error": "top_p: 7"}', True),
        (GENERATE, 200, '{"error": "top_p: 7"}', False),
        (GENERATE, 400, '{"text_output": "top_p"}', False),
    ],
)
def test_a_refusal_has_an_error_s_status_and_names_what_is_wrong(
    route: str, status: int, text: str, is_refused: bool
) -> None:
    bad = BadRequest(route, b"{}", "top_p")
    assert (bad.fault(status, text) is None) == is_refused


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"error": "of Triton"}', "of Triton"),
        ('{"error": {"message": "of OpenAI"}}', "of OpenAI"),
        ('{"text_output": "an answer"}', ""),
        ("<html>", ""),
        ("[1]", ""),
    ],
)
def test_errors_are_found_in_both_servers_bodies(text: str, error: str) -> None:
    assert error_of(text) == error


def test_bad_requests_are_many_and_different() -> None:
    assert len(set(BAD_REQUESTS)) == len(BAD_REQUESTS) > 15


def test_a_control_that_was_in_the_engine_at_both_kills_is_rightly_refused() -> None:
    assert AnswerError("the engine died twice\nwith this request in it: it is refused").is_suspected
    assert not AnswerError("engine process 7 was killed by SIGKILL").is_suspected
