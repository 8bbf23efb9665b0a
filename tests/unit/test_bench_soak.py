"""What a soak is judged by. The soak itself needs a server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flowprefill.bench.soak.bad_requests import BAD_REQUESTS
from flowprefill.bench.soak.command import LONG_MINUTES, bar_table, count_table, judge, summarise
from flowprefill.bench.soak.run import Soak
from flowprefill.bench.soak.traffic import Record, _error_of
from flowprefill.bench.soak.watch import Watch, growth

MB = 2**20


def make_soak() -> Soak:
    watch = Watch({("stub", 7): [100 * MB] * 30, ("engine", 8): [900 * MB] * 4}, [4 * MB] * 30)
    record = Record()
    record.outcomes[("chat", "answered")] = 5
    return Soak(record, watch, [1.0, 1.2], [4.0, 5.0], {}, 0.0)


def missed(soak: Soak, minutes: float = LONG_MINUTES) -> list[str]:
    return [bar.what for bar in judge(soak, minutes) if not bar.is_met]


def test_a_soak_in_which_nothing_happened_meets_all_bars() -> None:
    soak = make_soak()
    assert missed(soak) == []
    summary = summarise(soak, judge(soak, 30.0))
    assert summary["is_met"] and summary["requests"] == {"chat": {"answered": 5}}
    assert summary["growth"] == {"stub": 0.0, "/dev/shm": 0.0}  # that engine was killed too soon
    assert bar_table(judge(soak, 30.0)).row_count == len(judge(soak, 30.0))
    assert count_table(soak.record).row_count == 1


def hang(soak: Soak) -> None:
    soak.record.num_hung = 1


def change(soak: Soak) -> None:
    soak.record.num_changed = 1


def fail(soak: Soak) -> None:
    soak.record.num_wrong = 1


def leak_a_block(soak: Soak) -> None:
    soak.busy_at_end["num_kv_blocks_used"] = 1.0


def lose_a_count(soak: Soak) -> None:
    soak.unbalanced = -1.0


def leak_memory(soak: Soak) -> None:
    soak.watch.resident[("stub", 7)] = [(100 + step) * MB for step in range(30)]


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (hang, "clients without an end"),
        (change, "controls with other bytes"),
        (fail, "answers that were wrong"),
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
    leak_memory(soak)
    assert missed(soak, minutes=2.0) == []


def test_growth_leaves_the_warm_up_out() -> None:
    assert growth([1 * MB] * 10 + [5 * MB] * 20) == 0.0
    assert growth([5 * MB] * 20 + [6 * MB] * 10) == pytest.approx(0.2)
    assert growth([5 * MB] * 20 + [4 * MB] * 10) == pytest.approx(-0.2)


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
    assert _error_of(text) == error


def test_bad_requests_are_many_and_different() -> None:
    assert len(set(BAD_REQUESTS)) == len(BAD_REQUESTS) > 15
