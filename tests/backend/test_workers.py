"""The threads behind execute(): in order, bounded, and not ended by a job."""

from __future__ import annotations

import threading
from typing import NoReturn

import pytest

from flowprefill.errors import QueueFullError
from flowprefill_backend.workers import Worker
from tests.backend.conftest import hold
from tests.backend.fake_pb_utils import WAIT_S


def fail(*_: object) -> NoReturn:
    raise RuntimeError("broken")


def test_a_worker_outlives_a_job_that_fails_and_a_log_that_is_broken() -> None:
    worker, is_done = Worker("w", on_error=fail), threading.Event()
    worker.post(fail)
    worker.post(is_done.set)
    assert is_done.wait(WAIT_S)
    assert worker.close(WAIT_S)


def test_jobs_run_in_the_order_in_which_they_came() -> None:
    worker, ran = Worker("w", fail), list[int]()
    gate = hold(worker)
    for number in range(5):
        worker.post(lambda number=number: ran.append(number), num_bytes=5 - number)
    gate.set()
    assert worker.close(WAIT_S)
    assert ran == [0, 1, 2, 3, 4]


def test_a_full_worker_refuses_with_the_numbers_and_takes_more_when_it_has_room() -> None:
    worker, ran = Worker("parser", fail, max_jobs=2, max_bytes=100), list[str]()
    gate, has_room = hold(worker), threading.Event()
    worker.post(lambda: ran.append("first"), num_bytes=60)
    with pytest.raises(
        QueueFullError, match=r" \(parser\): 1 .* 60 bytes .* 41 bytes .* 100 bytes$"
    ):
        worker.post(lambda: ran.append("too big"), num_bytes=41)
    worker.post(has_room.set, num_bytes=40)
    with pytest.raises(QueueFullError, match=r" \(parser\): 2 requests of 100 bytes .* 2 requests"):
        worker.post(lambda: ran.append("one too many"))
    gate.set()
    assert has_room.wait(WAIT_S)
    worker.post(lambda: ran.append("last"), num_bytes=100)
    assert worker.close(WAIT_S)
    assert ran == ["first", "last"]


def test_a_worker_that_is_busy_is_left_behind() -> None:
    worker = Worker("w", fail)
    gate = hold(worker)
    assert not worker.close(0.01)
    gate.set()
