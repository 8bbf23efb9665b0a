"""A stop of the whole server: what runs may finish in time, what does not is told so."""

from __future__ import annotations

import os
import threading

from flowprefill.request import FinishReason
from flowprefill.server_log import (
    EXIT_TIMEOUT_VARIABLE,
    STOP_FD_VARIABLE,
    stopped_line,
    stopping_line,
)
from flowprefill_backend.triton_model import follow_stop
from tests.backend.conftest import Harness, hold
from tests.backend.fake_pb_utils import WAIT_S, ResponseSender


def is_told_of_the_stop(sender: ResponseSender) -> bool:
    error = sender.error
    assert error is not None
    return (error.code, error.message) == (
        "UNAVAILABLE",
        "Error generating stream: the server is stopping",
    )


def test_a_running_request_ends_in_full_while_new_ones_are_refused(harness: Harness) -> None:
    running = harness.send({"text_input": "a", "stream": True})
    req_id = harness.engine.wait_submitted().req_id
    harness.instance.refuse_new()
    assert is_told_of_the_stop(harness.send({"text_input": "a"}))
    harness.engine.say(req_id, 100)
    harness.engine.say(req_id, 100, FinishReason.LENGTH)
    assert harness.instance.drain(WAIT_S) == 0
    assert running.is_final and running.error is None
    assert list(harness.engine.submitted) == [req_id]


def test_what_does_not_finish_in_time_is_told_so_and_leaves_the_engine(harness: Harness) -> None:
    running = harness.send({"text_input": "a", "stream": True})
    req_id = harness.engine.wait_submitted().req_id
    harness.instance.refuse_new()
    assert harness.instance.drain(0) == 1
    assert running.is_final and is_told_of_the_stop(running)
    harness.engine.wait_cancelled(req_id)


def test_a_request_that_is_still_to_be_parsed_never_starts(harness: Harness) -> None:
    gate = hold(harness.instance._intake.short_parser)
    waiting = harness.send({"text_input": "a"})
    harness.instance.refuse_new()
    assert harness.instance.drain(0) == 1
    assert is_told_of_the_stop(waiting)
    gate.set()
    harness.instance._intake.short_parser.close(WAIT_S)
    assert harness.engine.submitted == {}


def test_an_answer_that_ends_at_the_timeout_is_not_cut_short(harness: Harness) -> None:
    running = harness.send({"text_input": "a"})
    req_id = harness.engine.wait_submitted().req_id
    gates = [hold(sender) for sender in harness.instance._senders]
    harness.engine.say(req_id, 100, FinishReason.LENGTH)
    harness.instance.refuse_new()
    num_cut_short: list[int] = []
    drain = threading.Thread(target=lambda: num_cut_short.append(harness.instance.drain(0)))
    drain.start()
    for gate in gates:
        gate.set()
    drain.join(WAIT_S)
    assert num_cut_short == [0] and running.error is None


def follow(harness: Harness, exit_timeout_s: float, word: bytes) -> None:
    """A launcher that says `word` and is gone, for an instance that follows it."""
    stop_fd, pipe = os.pipe()
    os.write(pipe, word)
    os.close(pipe)
    try:
        environ = {STOP_FD_VARIABLE: str(stop_fd), EXIT_TIMEOUT_VARIABLE: str(exit_timeout_s)}
        follow_stop(harness.instance, "m_0_0", environ)
    finally:
        os.close(stop_fd)


def test_the_launcher_s_stop_is_followed_and_reported(harness: Harness) -> None:
    running = harness.send({"text_input": "a", "stream": True})
    harness.engine.wait_submitted()
    follow(harness, 0, b"stop")
    assert is_told_of_the_stop(running)
    assert harness.log.lines[-2:] == [stopping_line("m_0_0"), stopped_line("m_0_0", 1)]


def test_a_launcher_that_dies_stops_no_model(harness: Harness) -> None:
    follow(harness, 0, b"")
    harness.send({"text_input": "a"})
    req_id = harness.engine.wait_submitted().req_id
    harness.engine.say(req_id, 100, FinishReason.LENGTH)
    assert stopping_line("m_0_0") not in harness.log.lines
