"""Cancelling: by a client that leaves and by a control request. Control requests in general."""

from __future__ import annotations

import json
import threading
from typing import NoReturn

import pytest

from flowprefill.engine_process import EngineState
from flowprefill.request import FinishReason, Request
from flowprefill.stats import EngineStats
from flowprefill_backend.cancel_poller import CancelPoller
from flowprefill_backend.live import LiveRequest
from tests.backend.conftest import Harness, hold
from tests.backend.fake_pb_utils import WAIT_S, ResponseSender
from tests.factories import make_request


def test_a_client_that_leaves_a_stream_is_answered_cancelled(harness: Harness) -> None:
    sender = harness.send({"text_input": "a", "stream": True})
    req_id = harness.engine.wait_submitted().req_id
    sender.leave()
    error = sender.error
    assert error is not None
    assert (error.code, error.message) == ("CANCELLED", "Request was cancelled")
    harness.engine.wait_cancelled(req_id)
    # A later request of the same lane ends after the line that follows the cancel.
    for _ in range(8):
        harness.send({"text_input": ""}).wait_final()
    lines = [line for line in harness.log.lines if "ancel" in line]
    assert lines == [
        "[flowprefill] Cancelling the request",
        "[flowprefill] Successfully cancelled the request",
    ]


def test_a_single_answer_that_is_cancelled_returns_the_text_so_far(harness: Harness) -> None:
    inputs = {"text_input": "a", "exclude_input_in_output": True, "return_finish_reason": True}
    sender = harness.send(inputs, request_id="x")
    req_id = harness.engine.wait_submitted().req_id
    for token_id in harness.ids("then"):
        harness.engine.say(req_id, token_id)
    # The lane is in order: these tokens are added before the cancel is seen.
    assert harness.send({"text_input": ""}, {"cancel_id": "x"}).text == "cancelled"
    assert sender.text == "then"
    assert sender.responses[0].text("finish_reason") == "cancelled"


def test_without_any_token_a_cancelled_single_answer_is_an_error(harness: Harness) -> None:
    sender = harness.send({"text_input": "a"})
    harness.engine.wait_submitted()
    sender.leave()
    assert sender.error is not None and sender.error.code == "CANCELLED"


def test_an_engine_that_cancels_by_itself_ends_the_request(harness: Harness) -> None:
    sender = harness.send({"text_input": "a", "stream": True})
    harness.engine.end(harness.engine.wait_submitted().req_id, FinishReason.CANCELLED)
    assert sender.error is not None and sender.error.code == "CANCELLED"


@pytest.mark.parametrize("place", ["parameter", "sampling_parameters"])
def test_cancel_id_cancels_the_live_request_of_that_id(harness: Harness, place: str) -> None:
    sender = harness.send({"text_input": "a", "stream": True}, request_id="7")
    other = harness.send({"text_input": "a", "stream": True}, request_id="8")
    harness.engine.wait_submitted(2)
    if place == "parameter":
        control = harness.send({"text_input": ""}, {"cancel_id": 7})
    else:
        sampling = json.dumps({"cancel_id": "7"})
        control = harness.send({"text_input": "", "sampling_parameters": sampling})
    (response,) = control.wait_final()
    assert response.text() == "cancelled"
    assert sender.error is not None and sender.error.code == "CANCELLED"
    assert not other.is_final
    assert len(harness.engine.cancelled) == 1


def test_of_requests_that_share_an_id_the_latest_is_cancelled(harness: Harness) -> None:
    first = harness.send({"text_input": "a", "stream": True}, request_id="same")
    latest = harness.send({"text_input": "a", "stream": True}, request_id="same")
    harness.engine.wait_submitted(2)
    assert harness.send({"text_input": ""}, {"cancel_id": "same"}).text == "cancelled"
    latest.wait_final()
    assert not first.is_final
    assert harness.send({"text_input": ""}, {"cancel_id": "same"}).text == "cancelled"
    first.wait_final()
    assert harness.send({"text_input": ""}, {"cancel_id": "same"}).text == "not found"


def test_an_id_of_nobody_and_of_a_finished_request_is_not_found(harness: Harness) -> None:
    sender = harness.send({"text_input": "a"}, request_id="1")
    req_id = harness.engine.wait_submitted().req_id
    harness.engine.say(req_id, 5, FinishReason.LENGTH)
    sender.wait_final()
    for cancel_id in ("1", "2"):
        assert harness.send({"text_input": ""}, {"cancel_id": cancel_id}).text == "not found"
    assert harness.engine.cancelled == []


@pytest.mark.parametrize("cancel_id", ["", True, 1.5])
def test_a_cancel_id_that_is_no_id_is_refused(harness: Harness, cancel_id: object) -> None:
    harness.send({"text_input": "a"})  # has no id of its own and must not be hit
    harness.engine.wait_submitted()
    error = harness.send({"text_input": ""}, {"cancel_id": cancel_id}).error
    assert error is not None and error.code == "INVALID_ARG" and "cancel_id" in error.message
    assert harness.engine.cancelled == []


def test_a_request_cancelled_while_it_is_parsed_never_reaches_the_engine(harness: Harness) -> None:
    may_parse = hold(harness.instance._intake.short_parser)
    sender = harness.send({"text_input": "a", "stream": True}, request_id="queued")
    assert harness.send({"text_input": ""}, {"cancel_id": "queued"}).text == "cancelled"
    assert sender.error is not None and sender.error.code == "CANCELLED"
    may_parse.set()
    harness.send({"text_input": "b"})
    assert harness.engine.wait_submitted().prompt_token_ids == harness.tokenizer.encode("b")
    assert len(harness.engine.submitted) == 1


def test_engine_stats_are_answered_as_json(harness: Harness) -> None:
    (response,) = harness.send({"text_input": ""}, {"engine_stats": True}).wait_final()
    assert EngineStats.from_wire(json.loads(response.text())) == EngineStats(num_decoding=3)


@pytest.mark.parametrize("state", list(EngineState))
def test_the_engine_s_state_is_told_without_asking_it(harness: Harness, state: EngineState) -> None:
    harness.engine.state = state
    is_free = hold(harness.instance._asker)  # as it is while the engine does not answer
    (response,) = harness.send({"text_input": ""}, {"engine_state": True}).wait_final()
    assert response.text() == state.value
    is_free.set()


def test_the_poller_sleeps_once_nothing_is_live(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    poll_round = CancelPoller._poll_round

    def count_round(poller: CancelPoller) -> None:
        poll_round(poller)
        rounds.append(len(poller._watched))

    monkeypatch.setattr(CancelPoller, "_poll_round", count_round)
    poller = CancelPoller(0.01, lambda live: None, lambda error: None)
    live = LiveRequest(1, ResponseSender())
    live.close(None)
    poller.watch(live)
    threading.Event().wait(0.1)  # ten intervals in which there is nothing to do
    poller.close(WAIT_S)
    assert rounds == [0]


def test_the_poller_outlives_a_cancel_that_fails_and_a_log_that_is_broken() -> None:
    is_found = threading.Event()

    def cancel(live: LiveRequest) -> None:
        assert live.req_id == 2, "the first one fails"
        is_found.set()

    def log(error: Exception) -> NoReturn:
        raise error

    poller = CancelPoller(0.01, cancel, log)
    for req_id in (1, 2):
        sender = ResponseSender()
        sender.leave()
        poller.watch(LiveRequest(req_id, sender))
    assert is_found.wait(WAIT_S)
    poller.close(WAIT_S)


def test_the_end_waits_for_a_question_that_is_under_way() -> None:
    sender = ResponseSender(poll_ends=threading.Event())
    live = LiveRequest(1, sender)
    asking = threading.Thread(target=live.is_client_gone)
    asking.start()
    assert sender.poll_begun.wait(WAIT_S)
    ending = threading.Thread(target=live.close, args=(None,))
    ending.start()
    ending.join(0.1)  # time enough to break the rule
    sender.poll_ends.set()
    ending.join(WAIT_S)
    asking.join(WAIT_S)
    sender.wait_final()  # checks that the rule was kept


def test_what_is_cancelled_is_never_submitted_and_only_cancelled_once() -> None:
    live = LiveRequest(1, ResponseSender())
    assert [live.cancel(), live.cancel()] == [True, False]
    submitted: list[Request] = []
    live.submit(submitted.append, make_request(4))
    assert submitted == []


def test_polls_are_bounded_and_rotate_over_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowprefill_backend.cancel_poller.MAX_POLLS_PER_S", 200)
    poller = CancelPoller(0.02, lambda live: None, lambda error: None)
    poller.close(WAIT_S)  # rounds are run by hand
    senders = [ResponseSender() for _ in range(10)]
    for i, sender in enumerate(senders):
        poller.watch(LiveRequest(i, sender))
    counts = []
    for _ in range(5):
        poller._poll_round()
        counts.append([sender.num_polls for sender in senders])
    assert [sum(c) for c in counts] == [4, 8, 12, 16, 20]
    assert counts[-1] == [2] * 10


def test_a_question_that_fails_is_put_again_and_told_once() -> None:
    errors: list[str] = []
    gone: list[int] = []
    poller = CancelPoller(
        0.02, lambda live: gone.append(live.req_id), lambda error: errors.append(str(error))
    )
    poller.close(WAIT_S)  # rounds are run by hand
    answers = iter([RuntimeError("busy"), RuntimeError("busy"), True])

    class BusyServer(ResponseSender):
        def is_cancelled(self) -> bool:
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

    poller.watch(LiveRequest(1, BusyServer()))
    for _ in range(4):
        poller._poll_round()
    assert (errors, gone) == (["busy"], [1])
