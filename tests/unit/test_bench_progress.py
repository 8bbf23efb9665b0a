"""The progress bar: its total follows what is expected."""

from __future__ import annotations

import pytest

from flowprefill.bench.progress import BenchProgress, bench_progress


def bar(progress: BenchProgress) -> tuple[float, float | None]:
    (task,) = progress._progress.tasks
    return task.completed, task.total


def test_what_is_expected_counts_from_what_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_progress(None) as progress:
        progress.expect(3)
        progress.advance()
        assert bar(progress) == (1, 3)
        progress.expect(6)
        assert bar(progress) == (1, 7)
        progress.expect(0)
        assert bar(progress) == (1, 1)
    assert "1/1" in capsys.readouterr().err


def test_steps_beyond_the_total_move_it(capsys: pytest.CaptureFixture[str]) -> None:
    with bench_progress(None) as progress:
        progress.advance()
        assert bar(progress) == (1, None)
        progress.expect(1)
        progress.advance()
        progress.advance()
        assert bar(progress) == (3, 3)
    assert "3/3" in capsys.readouterr().err
