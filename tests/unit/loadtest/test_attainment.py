"""Attainment of a load test: what counts as kept, missed, failed, and as nothing yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from attainment import Answer, Objective, Tally
from scoreboard import COLUMNS, Scoreboard, to_csv
from traffic import CHAT, CLASSES, DOCUMENT, Source

LOADTEST = Path(__file__).parents[3] / "clients" / "loadtest"
OBJECTIVE = Objective(ttft_ms=250, tbt_ms=100)


def answer(*token_ms: float, error: Exception | None = None) -> Answer:
    """Sent at 5 s, with tokens so many milliseconds later."""
    return Answer(5.0, [5.0 + ms / 1000 for ms in token_ms], error)


def tally(*answers: Answer) -> Tally:
    counts = Tally()
    for each in answers:
        counts.add(each, OBJECTIVE)
    return counts


def test_times_of_an_answer() -> None:
    assert answer(200, 250, 400).ttft_ms == pytest.approx(200)
    assert answer(200, 250, 400).tbt_ms == pytest.approx([50, 150])
    assert answer().ttft_ms is None
    assert answer().tbt_ms == answer(10).tbt_ms == []


def test_attainment_needs_both_objectives_of_each_request() -> None:
    counts = tally(
        answer(249, 340),  # both
        answer(251, 340),  # late first token
        answer(249, 351),  # a gap too long
        answer(100),  # no gap at all
        answer(),  # ended without a token
    )
    assert counts == Tally(num_requests=5, num_failed=0, num_ttft_met=3, num_tbt_met=3, num_met=2)
    assert counts.attainment == 0.4
    assert counts.goodput(duration_s=4.0) == 0.5


def test_a_failure_misses_whatever_came_before_it() -> None:
    counts = tally(answer(100, 150, error=ValueError("engine died")), answer(100, 150))
    assert counts == Tally(num_requests=2, num_failed=1, num_ttft_met=1, num_tbt_met=1, num_met=1)


@pytest.mark.parametrize(
    ("token_ms", "stopped_ms", "num_counted"),
    [
        ((), 240, 0),  # its first token could have come in time
        ((), 260, 1),
        ((200,), 290, 0),
        ((200,), 310, 1),  # the gap is too long already
        ((300,), 310, 1),  # so was the wait
    ],
)
def test_what_is_cut_off_counts_when_it_was_late(
    token_ms: tuple[float, ...], stopped_ms: float, num_counted: int
) -> None:
    counts = Tally()
    counts.add_cut_off(answer(*token_ms), OBJECTIVE, now_s=5.0 + stopped_ms / 1000)
    assert (counts.num_requests, counts.num_met) == (num_counted, 0)


def test_nothing_has_no_attainment() -> None:
    assert Tally().attainment is None
    assert Tally().goodput(0.0) is None
    assert all(row["attainment"] == "-" for row in Scoreboard(CLASSES).rows(0.0))


def test_scoreboard_adds_up_the_processes_and_scales_objectives() -> None:
    board, worker = Scoreboard(CLASSES), Scoreboard(CLASSES)
    board.slo_scale = worker.slo_scale = 2.0
    board.finished(CHAT, answer(400, 500))  # in time at twice 250 ms
    worker.finished(CHAT, answer(600))
    worker.finished(DOCUMENT, answer(600))
    board.merge(worker.take())
    rows = {row["name"]: row for row in board.rows(duration_s=2.0)}
    assert rows["chat"] == {
        "name": "chat", "requests": "2", "failed": "0", "ttft_slo": "500", "ttft_met": "50.0%",
        "tbt_slo": "200", "tbt_met": "100.0%", "attainment": "50.0%", "goodput": "0.50",
    }  # fmt: skip
    assert (rows["total"]["requests"], rows["total"]["attainment"]) == ("3", "66.7%")
    assert worker.rows(2.0)[0]["requests"] == "0"  # taken, not to be counted twice
    assert to_csv(board.rows(2.0)).splitlines()[0] == ",".join(COLUMNS.values())
    board.reset()
    assert board.rows(2.0)[0]["requests"] == "0"


def test_a_seed_repeats_prompts_and_no_two_of_them_begin_alike() -> None:
    first, again = Source(DOCUMENT, "7/0/1"), Source(DOCUMENT, "7/0/1")
    drawn = [first.draw() for _ in range(20)]
    assert drawn == [again.draw() for _ in range(20)]
    assert Source(DOCUMENT, None).draw() != Source(DOCUMENT, None).draw()
    assert len({tuple(prompt.split()[:16]) for prompt, _ in drawn}) == 20
    assert all(2000 <= len(prompt.split()) <= 4010 and 16 <= n <= 32 for prompt, n in drawn)
    assert len(Source(DOCUMENT, "s", prompt_scale=0.1).draw()[0].split()) <= 410


def test_the_load_test_needs_no_engine() -> None:
    code = (
        "import sys, locust, locustfile;"
        "print([name for name in ('torch', 'flowprefill.engine') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=LOADTEST, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
