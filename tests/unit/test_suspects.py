"""Which request kills the engine: the rule by itself, and with an engine that is killed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flowprefill.engine_process import EngineState
from flowprefill.errors import EngineKillerError
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.suspects import FORGET_S, Suspects
from tests import stand_in_engine
from tests.factories import make_request
from tests.unit.test_engine_process import ENDLESS, Harness, counting_request


def request(kind: int, **sampling: int) -> Request:
    """Two of one kind are copies, as when a client sends its request again."""
    made = make_request(3, **sampling)
    made.prompt_token_ids[:] = [kind] * 3
    return made


def is_refused(suspects: Suspects, asked: Request, now_s: float = 0.0) -> bool:
    return suspects.refusal(asked, now_s) is not None


def test_the_only_request_that_was_there_twice_is_refused() -> None:
    suspects = Suspects()
    assert suspects.on_death([request(1), request(2), request(3)], 0.0) is None
    assert not is_refused(suspects, request(1))
    assert suspects.on_death([request(1), request(4), request(5)], 10.0) == request(1)
    assert is_refused(suspects, request(1), 10.0)
    assert not any(is_refused(suspects, request(kind), 10.0) for kind in (2, 3, 4, 5))


def test_innocents_that_come_again_with_the_killer_are_not_refused() -> None:
    suspects, killer = Suspects(), request(7)
    everybody = range(10)
    for _ in range(2):
        assert suspects.on_death([request(kind) for kind in everybody], 0.0) is None
    num_deaths = 0
    for kind in everybody:
        assert suspects.may_enter(request(kind), 0.0)
        suspects.enter(request(kind), 0.0)
        others = [request(other) for other in everybody if other > kind]
        assert not any(suspects.may_enter(other, 0.0) for other in others)
        assert suspects.may_enter(request(99), 0.0)
        suspects.enter(request(99), 0.0)
        if request(kind) == killer:
            assert suspects.on_death([request(kind), request(99)], 0.0) == killer
            num_deaths += 1
        else:
            suspects.clear(request(kind), 0.0)
    assert num_deaths == 1
    assert [kind for kind in (*everybody, 99) if is_refused(suspects, request(kind))] == [7]


def test_a_request_that_ended_meanwhile_is_cleared() -> None:
    suspects = Suspects()
    for _ in range(5):
        suspects.on_death([request(1)], 0.0)
        suspects.clear(request(1), 0.0)
    assert not is_refused(suspects, request(1))


def test_a_request_that_was_not_run_is_not_cleared() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.on_death([request(1), request(2)], 0.0)
    suspects.enter(request(1), 0.0)
    suspects.leave(request(1).req_id)
    assert suspects.may_enter(request(2), 0.0)
    assert suspects.on_death([request(1)], 0.0) == request(1)


def test_a_refusal_is_forgotten() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.on_death([request(1)], 0.0)
    assert is_refused(suspects, request(1), FORGET_S)
    assert not is_refused(suspects, request(1), FORGET_S + 1)


def test_requests_cost_nothing_again_once_all_is_forgotten() -> None:
    suspects = Suspects()
    suspects.on_death([request(1), request(2)], 0.0)
    suspects.on_death([request(3)], 10.0)
    suspects.clear(request(9), FORGET_S + 5)
    assert len(suspects._known) == 1
    suspects.clear(request(9), FORGET_S + 11)
    innocent = request(4)
    assert suspects.refusal(innocent, FORGET_S + 11) is None
    assert "digest" not in vars(innocent)


def test_a_request_is_digested_once() -> None:
    asked = request(1)
    digest = asked.digest
    asked.prompt_token_ids.append(5)
    assert asked.digest is digest != request(2).digest


def test_other_sampling_is_another_request() -> None:
    suspects = Suspects()
    for _ in range(2):
        suspects.on_death([request(1, max_tokens=5)], 0.0)
    assert is_refused(suspects, request(1, max_tokens=5))
    assert not is_refused(suspects, request(1, max_tokens=6))


def test_no_more_is_remembered_than_has_room() -> None:
    suspects = Suspects()
    for kind in range(10_000):
        suspects.on_death([request(kind)], 0.0)
    assert len(suspects._known) == 4096
    assert suspects.on_death([request(9_999)], 0.0) == request(9_999)


@pytest.fixture
def running() -> Iterator[Harness]:
    made = Harness().start()
    yield made
    made.client.close()


def test_a_request_that_kills_the_engine_twice_is_refused_and_others_are_served(
    running: Harness,
) -> None:
    for req_id in (1, 2):
        running.submit(req_id, stand_in_engine.CRASH)
        assert "SIGSEGV" in str(running.end(req_id).error_message)
        running.wait_state(EngineState.READY)
    with pytest.raises(EngineKillerError, match="died twice"):
        running.submit(3, stand_in_engine.CRASH)
    running.submit(4)
    assert running.end(4).finish_reason is FinishReason.LENGTH
    assert running.client.num_restarts == 2


def test_a_request_that_makes_the_engine_fail_is_refused_as_one_that_kills_it(
    running: Harness,
) -> None:
    """Such an engine ends all its requests before its process ends."""
    for req_id in (1, 2):
        running.submit(10 * req_id, first_token=10 * req_id, max_tokens=ENDLESS)
        running.wait(lambda req_id=req_id: running.outputs[10 * req_id])
        running.submit(req_id, stand_in_engine.RAISE)
        for each in (req_id, 10 * req_id):
            end = running.end(each)
            assert (end.error_code, end.reject_reason) == ("UNAVAILABLE", None)
            message = "exited with code 1: the stand-in failed: engine thread fell over"
            assert message in str(end.error_message)
            assert len(running.ends(each)) == 1
        running.wait_state(EngineState.READY)
    assert sum(line.endswith("fell over; 2 requests lost") for line in running.log) == 2
    with pytest.raises(EngineKillerError, match="died twice"):
        running.submit(3, stand_in_engine.RAISE)
    running.submit(4)
    assert running.end(4).finish_reason is FinishReason.LENGTH


def test_a_suspect_that_the_engine_refuses_stays_one(running: Harness) -> None:
    for req_id in (1, 2):
        running.submit(req_id, max_tokens=ENDLESS)
        running.wait(lambda req_id=req_id: running.outputs[req_id])
        running.kill()
        running.end(req_id)
        running.wait_state(EngineState.READY)
        if req_id == 1:
            copy = counting_request(10, max_tokens=ENDLESS)
            object.__setattr__(copy.slo, "ttft_s", -1.0)  # past the checks of this side
            running.client.submit(copy)
            assert running.end(10).reject_reason == "invalid"
    with pytest.raises(EngineKillerError, match="died twice"):
        running.submit(3, max_tokens=ENDLESS)


def test_requests_that_were_there_twice_run_one_at_a_time_and_all_finish(
    running: Harness,
) -> None:
    """Somebody else killed the engine: nobody is to blame."""
    prompts, num_tokens = (10, 20, 30), 300

    def send(first_id: int) -> list[int]:
        req_ids = [first_id + index for index in range(len(prompts))]
        for req_id, prompt in zip(req_ids, prompts, strict=True):
            running.client.submit(counting_request(req_id, prompt, num_tokens))
        return req_ids

    for attempt in range(2):
        req_ids = send(10 * attempt)
        running.wait(lambda ids=req_ids: all(running.outputs[req_id] for req_id in ids))
        running.kill()
        for req_id in req_ids:
            running.end(req_id)
        running.wait_state(EngineState.READY)
    order: list[int] = []
    receive = running.client._on_output

    def note(output: TokenOutput) -> None:
        order.append(output.req_id)
        receive(output)

    running.client._on_output = note
    req_ids = send(100)
    assert [running.end(req_id).finish_reason for req_id in req_ids] == [FinishReason.LENGTH] * 3
    assert order == [req_id for req_id in req_ids for _ in range(num_tokens)]


def test_a_copy_that_waits_is_refused_with_the_killer(running: Harness) -> None:
    for first in (10, 20):
        running.submit(first, max_tokens=ENDLESS)
        running.wait(lambda first=first: running.outputs[first])
        running.submit(first + 1, stand_in_engine.CRASH, ENDLESS)
        running.end(first)
        running.wait_state(EngineState.READY)
    running.submit(30, max_tokens=ENDLESS)
    for req_id in (31, 32):
        running.submit(req_id, stand_in_engine.CRASH, ENDLESS)
    running.wait(lambda: running.outputs[30])
    assert not running.outputs[31]
    running.client.cancel(30)
    assert "SIGSEGV" in str(running.end(31).error_message)
    end = running.end(32)
    assert (end.error_code, end.reject_reason) == ("INVALID_ARG", "invalid")
    assert "died twice with this request" in str(end.error_message)
    running.wait_state(EngineState.READY)
    running.submit(33, max_tokens=5)
    assert running.end(33).finish_reason is FinishReason.LENGTH


def test_a_suspect_that_waits_for_another_can_be_cancelled(running: Harness) -> None:
    for attempt in range(2):
        for req_id, prompt in ((10 * attempt, 10), (10 * attempt + 1, 20)):
            running.client.submit(counting_request(req_id, prompt, ENDLESS))
        first = 10 * attempt
        running.wait(lambda first=first: running.outputs[first] and running.outputs[first + 1])
        running.kill()
        running.end(first)
        running.wait_state(EngineState.READY)
    running.client.submit(counting_request(100, 10, ENDLESS))
    running.client.submit(counting_request(101, 20, ENDLESS))
    running.wait(lambda: running.outputs[100])
    running.client.cancel(101)
    assert running.end(101).finish_reason is FinishReason.CANCELLED
    assert running.tokens(101) == [None]
