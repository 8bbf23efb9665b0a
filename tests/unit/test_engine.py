"""The engine's promises, as scenarios on a tiny model: who runs when, how requests end, and that
one request's fate is its own."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.errors import (
    EngineDeadError,
    InvalidParameterError,
    InvalidRequestError,
    PromptTooLongError,
    UnavailableError,
)
from flowprefill.request import FinishReason, Request
from tests.engine_harness import WAIT_S, Harness, kv_bytes, patient, running, urgent, wait_until
from tests.factories import TINY_VOCAB_SIZE, make_request, write_tiny_model

MAX_LEN = 384
CACHE_TOKENS = 256  # less than MAX_LEN
EOS_ID = TINY_VOCAB_SIZE - 1
PREFILL_SLICES = 8  # of a short prompt, by tile: three of two layers, QKV and head of the last
STEP_SLICES = 4  # each layer, then the logits
MID_PREFILL = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=3, max_len=MAX_LEN)


@pytest.fixture
def harness(model: Path) -> Iterator[Harness]:
    with running(model) as harness:
        yield harness


# ---- who runs when ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["s-edf", "edf", "sjf", "srpt"])
def test_urgent_arrival_preempts_at_the_next_boundary(model: Path, policy: str) -> None:
    # measured times decide for srpt: most of the long prompt must be left
    moment = 0 if policy == "srpt" else MID_PREFILL
    with running(model, policy=policy) as h:
        h.at_slice(moment, lambda: h.submit(urgent(2)))
        h.submit(patient(1))
        h.end(1)
        assert h.first_token_order() == [2, 1]
        assert h.slices_at[0] == moment + 1 + PREFILL_SLICES
        assert h.end(1).num_preemptions == 1
        assert h.end(2).num_preemptions == 0
        stats = h.engine.stats()
        assert stats.num_preemptions == 1
        prefill = h.of(2)[0].prefill
        assert prefill is not None and prefill.blocking_s is not None
        assert 0 <= prefill.blocking_s < WAIT_S


def test_fcfs_lets_the_urgent_one_wait(model: Path) -> None:
    with running(model, policy="fcfs") as h:
        h.at_slice(MID_PREFILL, lambda: h.submit(urgent(2)))
        h.submit(patient(1))
        h.end(2)
        assert h.first_token_order() == [1, 2]
        assert h.slices_at[0] == PREFILL_SLICES
        assert h.engine.stats().num_preemptions == 0


@pytest.mark.parametrize("policy", ["s-edf", "edf"])
def test_equal_deadlines_never_switch(model: Path, policy: str) -> None:
    first, *others = [patient(i, 100) for i in range(1, 5)]
    with running(model, policy=policy) as h:
        # one arrival time for all, so exactly one deadline
        h.at_slice(MID_PREFILL, lambda: [h.engine.submit(at(r, arrival_s)) for r in others])
        arrival_s = h.engine._clock.now_s()
        h.engine.submit(at(first, arrival_s))
        h.end(4)
        assert h.first_token_order() == [1, 2, 3, 4]
        assert h.engine.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("granularity", "order"),
    [("whole", [1, 2]), ("chunk:64", [2, 1]), ("layer", [2, 1]), ("op", [2, 1]), ("tile", [2, 1])],
)
def test_preemption_needs_a_boundary(model: Path, granularity: str, order: list[int]) -> None:
    with running(model, granularity=granularity) as h:
        h.at_slice(0, lambda: h.submit(urgent(2)))
        h.submit(patient(1))
        h.end(1)
        h.end(2)
        assert h.first_token_order() == order


def test_parked_requests_get_the_tokens_of_an_undisturbed_run(model: Path) -> None:
    requests = [patient(1, 300, max_tokens=12), urgent(2, 50, max_tokens=12)]
    with running(model) as alone:
        for request in requests:
            alone.submit(request)
            alone.end(request.req_id)
    with running(model) as h:
        h.at_slice(MID_PREFILL, lambda: h.submit(requests[1]))
        h.submit(requests[0])
        h.end(1)
    assert h.engine.stats().num_preemptions == 1
    for req_id in (1, 2):
        assert h.tokens(req_id) == alone.tokens(req_id)


def test_first_token_leaves_before_any_further_slice(harness: Harness) -> None:
    harness.at_slice(0, lambda: harness.submit(patient(2), patient(3)))
    harness.submit(urgent(1))
    harness.end(3)
    firsts = [harness.outputs.index(harness.of(req_id)[0]) for req_id in (1, 2, 3)]
    assert [harness.slices_at[i] for i in firsts] == [n * PREFILL_SLICES for n in (1, 2, 3)]


def test_what_the_running_slice_is_predicted_to_take_can_be_read(harness: Harness) -> None:
    read: list[float] = []
    for slice_index in range(PREFILL_SLICES):
        harness.at_slice(slice_index, lambda: read.append(harness.engine.slice_s))
    harness.submit(urgent(1, max_tokens=1))
    harness.end(1)
    assert len(read) == PREFILL_SLICES and read == sorted(read)
    assert read[0] > 0
    assert harness.engine.slice_s == 0


def test_sequences_decode_together(harness: Harness) -> None:
    harness.at_slice(0, lambda: harness.submit(urgent(2), urgent(3)))
    harness.submit(urgent(1))
    harness.end(3)
    # 2 and 3 are one pass, in which each has an attention slice of its own in two layers
    assert harness.device.num_slices == 2 * PREFILL_SLICES + 2 + 3 * STEP_SLICES


def test_decode_step_left_midway_goes_on_after_the_prefill(harness: Harness) -> None:
    step_start = PREFILL_SLICES
    harness.at_slice(step_start, lambda: harness.submit(urgent(2, max_tokens=1)))
    harness.submit(patient(1, 50, max_tokens=2))
    harness.end(1)
    assert harness.first_token_order() == [1, 2]
    assert harness.tokens(2) != []
    assert [o.req_id for o in harness.outputs] == [1, 2, 1]
    # nothing of the step ran twice
    assert harness.device.num_slices == 2 * PREFILL_SLICES + STEP_SLICES


def test_idle_engine_does_nothing(harness: Harness) -> None:
    harness.submit(urgent(1))
    harness.end(1)
    wait_until(lambda: harness.engine.stats().num_kv_blocks_used == 0)
    assert harness.engine._wake_s() is None  # sleeps until somebody calls
    before = harness.engine.stats()
    harness.engine._thread.join(0.3)
    assert harness.engine.stats() == before


# ---- ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "reason", "num_tokens"),
    [
        ({"max_tokens": 1, "logit_bias": {7: 100.0}}, FinishReason.LENGTH, 1),
        ({"max_tokens": 5, "logit_bias": {7: 100.0}}, FinishReason.LENGTH, 5),
        ({"max_tokens": 5, "logit_bias": {EOS_ID: 100.0}}, FinishReason.STOP, 1),
        (
            {"max_tokens": 5, "logit_bias": {EOS_ID: 100.0}, "ignore_eos": True},
            FinishReason.LENGTH,
            5,
        ),
        (
            {"max_tokens": 5, "logit_bias": {EOS_ID: 100.0}, "min_tokens": 3},
            FinishReason.STOP,
            4,
        ),
        (
            {"max_tokens": 5, "logit_bias": {9: 100.0}, "stop_token_ids": (8, 9)},
            FinishReason.STOP,
            1,
        ),
        (
            {"max_tokens": 5, "logit_bias": {9: 100.0}, "stop_token_ids": (9,), "min_tokens": 2},
            FinishReason.STOP,
            3,
        ),
    ],
)
def test_answer_ends_where_its_parameters_say(
    harness: Harness, sampling: dict[str, Any], reason: FinishReason, num_tokens: int
) -> None:
    harness.submit(make_request(20, 10.0, **sampling))
    assert harness.end(0).finish_reason is reason
    assert len(harness.tokens(0)) == num_tokens
    assert None not in harness.tokens(0)


def test_logprobs_name_the_chosen_token_first(harness: Harness) -> None:
    harness.submit(patient(1, logprobs=3), patient(2))
    harness.end(1)
    for output in harness.of(1):
        chosen, *others = output.top_logprobs
        assert (chosen.token_id, chosen.logprob) == (output.token_id, output.logprob)
        assert chosen.rank == 1  # greedy
        assert [other.rank for other in others] == [2, 3]
        assert chosen.logprob >= others[0].logprob >= others[1].logprob
    harness.end(2)
    for output in harness.of(2):
        assert output.top_logprobs == []
        assert output.logprob is not None and output.logprob <= 0


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "error", "text"),
    [
        (make_request(0), InvalidRequestError, "no tokens"),
        (
            make_request(MAX_LEN, max_tokens=1),
            PromptTooLongError,
            f"prompt of {MAX_LEN} tokens \\+ max_tokens=1 > max_model_len={MAX_LEN}",
        ),
        (make_request(1, max_tokens=10_000), PromptTooLongError, "max_tokens=10000"),
        (
            make_request(3, vocab_size=1, stop_token_ids=(TINY_VOCAB_SIZE,)),
            InvalidParameterError,
            f"stop_token_ids={TINY_VOCAB_SIZE}: .*{TINY_VOCAB_SIZE - 1}",
        ),
    ],
)
def test_request_that_can_never_be_served_is_refused(
    harness: Harness, request_: Request, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        harness.engine.submit(request_)
    assert harness.engine.stats().num_started == 0
    harness.submit(urgent(1))
    assert harness.end(1).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token_id", [-1, TINY_VOCAB_SIZE])
def test_token_outside_the_vocabulary_is_refused(harness: Harness, token_id: int) -> None:
    request = urgent(1)
    request.prompt_token_ids[5] = token_id
    with pytest.raises(InvalidParameterError, match=f"{token_id}: must be in \\[0, 272\\)"):
        harness.engine.submit(request)


def test_request_may_fill_the_cache_and_not_exceed_it(model: Path) -> None:
    with running(model, kv_cache_memory_bytes=kv_bytes(CACHE_TOKENS, num_layers=3)) as h:
        assert h.engine.info.num_kv_blocks == CACHE_TOKENS // 16
        with pytest.raises(
            PromptTooLongError,
            match=f"{CACHE_TOKENS - 1} tokens \\+ max_tokens=2 > {CACHE_TOKENS} tokens of the KV",
        ):
            h.engine.submit(patient(3, CACHE_TOKENS - 1, max_tokens=2))
        h.submit(patient(1, CACHE_TOKENS - 2, max_tokens=2), urgent(2))
        assert h.end(1).finish_reason is FinishReason.LENGTH
        assert h.end(2).finish_reason is FinishReason.LENGTH


def test_id_in_use_is_refused_and_its_owner_unharmed(harness: Harness) -> None:
    refused: list[Exception] = []

    def submit_again() -> None:
        try:
            harness.submit(urgent(1))
        except InvalidRequestError as error:
            refused.append(error)

    harness.at_slice(MID_PREFILL, submit_again)
    harness.submit(urgent(1))
    harness.end(1)
    assert "req_id=1" in str(refused[0])
    assert len(harness.tokens(1)) == 4


# ---- cancel -------------------------------------------------------------------------------------


def test_cancel_before_the_arrival_is_taken_in(harness: Harness) -> None:
    def submit_and_cancel() -> None:
        harness.submit(urgent(2))
        harness.engine.cancel(2)

    harness.at_slice(MID_PREFILL, submit_and_cancel)
    harness.submit(patient(1))
    assert harness.end(1).finish_reason is FinishReason.LENGTH
    assert [o.finish_reason for o in harness.of(2)] == [FinishReason.CANCELLED]


def test_second_late_and_unknown_cancels_do_nothing(harness: Harness) -> None:
    harness.submit(urgent(1))
    harness.end(1)
    harness.at_slice(
        harness.device.num_slices + MID_PREFILL,
        lambda: [harness.engine.cancel(req_id) for req_id in (1, 2, 2, 3, 77)],
    )
    harness.submit(patient(2), patient(3), patient(4))
    assert harness.end(4).finish_reason is FinishReason.LENGTH
    assert harness.engine.stats().num_cancelled == 2
    for req_id in (2, 3):
        assert [o.finish_reason for o in harness.of(req_id)] == [FinishReason.CANCELLED]
    assert harness.end(1).finish_reason is FinishReason.LENGTH


def test_cancelled_prefill_ends_at_the_next_boundary(harness: Harness) -> None:
    harness.at_slice(MID_PREFILL, lambda: harness.engine.cancel(1))
    harness.submit(patient(1))
    assert harness.end(1).token_id is None
    wait_until(lambda: harness.engine.stats().num_kv_blocks_used == 0)
    assert harness.device.num_slices == MID_PREFILL + 1


def test_cancelled_member_of_a_step_left_midway_leaves_the_others_their_tokens(
    model: Path,
) -> None:
    requests = [urgent(i, 30 + i, max_tokens=6) for i in (1, 2, 3)]
    newcomer = urgent(9, 40)
    with running(model) as alone:
        for request in [*requests, newcomer]:
            alone.submit(request)
            alone.end(request.req_id)

    def cancel_and_arrive() -> None:
        h.engine.cancel(2)
        h.submit(newcomer)  # gets the blocks of the cancelled one

    with running(model) as h:
        h.at_slice(0, lambda: h.submit(*requests[1:]))
        h.at_slice(3 * PREFILL_SLICES + STEP_SLICES + 1, cancel_and_arrive)
        h.submit(requests[0])
        assert h.end(2).finish_reason is FinishReason.CANCELLED
    for req_id in (1, 3, 9):
        assert h.tokens(req_id) == alone.tokens(req_id)


# ---- failures -----------------------------------------------------------------------------------


def test_row_that_is_not_finite_fails_alone(model: Path) -> None:
    poison = 200
    healthy = [urgent(i, 40, max_tokens=6) for i in (1, 3)]
    for request in healthy:
        request.prompt_token_ids[:] = [t for t in request.prompt_token_ids if t != poison]
    with running(model) as alone:
        for request in healthy:
            alone.submit(request)
            alone.end(request.req_id)
    assert poison not in alone.tokens(1) + alone.tokens(3)
    sick = urgent(2, 40)
    sick.prompt_token_ids[20] = poison
    with running(model) as h:
        h.engine._model.program.operators._embed[poison] = math.nan
        h.at_slice(0, lambda: h.submit(sick))
        h.submit(healthy[0])
        end = h.end(2)
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "INTERNAL")
        assert "not finite" in (end.error_message or "")
        h.end(1)
        h.submit(healthy[1])  # in the blocks that the sick one left
        h.end(3)
        assert h.engine.stats().num_failed == 1
    for req_id in (1, 3):
        assert h.tokens(req_id) == alone.tokens(req_id)


def test_failing_slice_fails_every_live_request_aloud(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hooked: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)

    def fail() -> None:
        h.submit(urgent(3))  # still in the inbox when the engine dies
        raise RuntimeError("device lost")

    try:
        with running(model) as h:
            h.at_slice(1, lambda: h.submit(urgent(2)))
            h.at_slice(PREFILL_SLICES, fail)
            h.submit(patient(1))
            for req_id in (1, 2, 3):
                end = h.end(req_id)
                assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
                assert "RuntimeError: device lost" in (end.error_message or "")
            h.engine._thread.join(WAIT_S)
            with pytest.raises(EngineDeadError, match="device lost"):
                h.engine.submit(urgent(4))
            h.engine.cancel(1)
            stats = h.engine.stats()
            assert stats.num_started == stats.num_failed == 3
            h.engine.close()
            # the dead engine is not at rest: leave the block before finish() looks
            raise _Over
    except _Over:
        pass
    assert [str(args.exc_value) for args in hooked] == ["device lost"]
    assert "Traceback" not in capsys.readouterr().err  # printed by the hook alone


class _Over(Exception):
    pass


# ---- close --------------------------------------------------------------------------------------


def test_close_lets_running_requests_end(model: Path) -> None:
    with running(model) as h:
        h.submit(patient(1), urgent(2))
        h.engine.close(math.inf)
        assert {h.end(i).finish_reason for i in (1, 2)} == {FinishReason.LENGTH}
        with pytest.raises(UnavailableError, match="closing"):
            h.engine.submit(urgent(3))
        h.engine.close()  # again: no effect


@pytest.mark.parametrize("drain_s", [0.0, 0.05])
def test_close_fails_what_runs_longer_than_the_drain(model: Path, drain_s: float) -> None:
    with running(model) as h:
        closer = threading.Thread(target=h.engine.close, args=(drain_s,))

        def close() -> None:
            closer.start()
            wait_until(lambda: h.engine._interrupt.is_raised)

        h.at_slice(MID_PREFILL, close)
        h.at_slice(MID_PREFILL + 1, lambda: time.sleep(drain_s))  # a slice that takes long
        h.submit(patient(1), patient(2))
        for end in (h.end(1), h.end(2)):
            assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
        closer.join(WAIT_S)
        assert not closer.is_alive()
        # at the first boundary past the limit, not at the end of the prefill
        assert h.device.num_slices <= MID_PREFILL + 2


def test_close_ends_when_the_last_request_times_out(model: Path) -> None:
    with running(model) as h:
        h.engine.submit(at(urgent(1), h.engine._clock.now_s() - 2000))
        closer = threading.Thread(target=h.engine.close, args=(math.inf,), daemon=True)
        closer.start()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        assert h.end(1).error_code == "UNAVAILABLE"


def at(request: Request, arrival_s: float) -> Request:
    return dataclasses.replace(request, arrival_s=arrival_s)
