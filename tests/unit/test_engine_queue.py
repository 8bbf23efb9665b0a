"""What waits in the engine: for how long, how much of it, in which order, and who is told what."""

from __future__ import annotations

import dataclasses
import math
import random
import threading
from pathlib import Path

import pytest

from flowprefill.errors import QueueFullError
from flowprefill.request import FinishReason, Request
from tests.engine_harness import (
    QUEUE_TIMEOUT_S,
    WAIT_S,
    Harness,
    alone,
    kv_bytes,
    patient,
    running,
    urgent,
    with_slo,
)
from tests.factories import write_tiny_model

NUM_LAYERS = 2
NEARLY_S = QUEUE_TIMEOUT_S - 0.02
"""Age of a request whose waiting is over in a moment."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


# ---- the queue timeout --------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["whole", "tile"])
def test_waiting_ends_on_time_in_the_middle_of_a_slice(model: Path, granularity: str) -> None:
    with running(model, granularity=granularity) as h:
        h.at_slice(0, lambda: h.submit(patient(2), age_s=NEARLY_S))
        h.at_slice(1, lambda: h.end(2))  # a slice that takes that long
        h.submit(urgent(1, 100))
        end = h.end(2)
        assert end.finish_reason is FinishReason.ERROR
        assert (end.error_code, end.num_preemptions) == ("UNAVAILABLE", 0)
        assert "queue_timeout_ms=1e+06" in (end.error_message or "")
        assert h.slices_at[h.outputs.index(end)] == 1
        assert h.end(1).finish_reason is FinishReason.LENGTH
        assert h.engine.stats().num_rejected == 1


def test_who_is_too_old_at_its_arrival_never_gets_the_device(model: Path) -> None:
    with running(model) as h:
        for req_id in range(5):
            h.submit(urgent(req_id), age_s=QUEUE_TIMEOUT_S + 1)
        h.play()
        assert {h.end(i).error_code for i in range(5)} == {"UNAVAILABLE"}
        assert h.device.num_slices == 0


def test_who_has_started_is_not_timed_out(model: Path) -> None:
    """Neither while parked nor while evicted and waiting for its blocks."""
    last = with_slo(patient(4, 200), ttft_s=9000.0)
    with running(model, kv_cache_memory_bytes=kv_bytes(256, NUM_LAYERS)) as h:
        h.at_slice(1, lambda: h.submit(urgent(2)))
        h.at_token(2, 1, lambda: h.submit(last, age_s=QUEUE_TIMEOUT_S - 0.6))
        h.at_token(1, 2, lambda: h.submit(urgent(3, 200)))  # evicts it
        h.at_token(3, 1, lambda: h.end(4))
        h.submit(patient(1, 100), age_s=QUEUE_TIMEOUT_S - 0.5)
        h.play()
        stats = h.engine.stats()
        assert (stats.num_preemptions, stats.num_evictions) == (1, 1)
        assert [o.error_code for o in h.of(4)] == ["UNAVAILABLE"]
        for req_id in (1, 2, 3):
            assert h.end(req_id).finish_reason is FinishReason.LENGTH


def test_cancel_after_the_timeout_answers_nobody_twice(model: Path) -> None:
    def time_out_and_cancel() -> None:
        h.submit(patient(2), age_s=QUEUE_TIMEOUT_S)
        h.end(2)
        h.engine.cancel(2)

    with running(model, granularity="whole") as h:
        h.at_slice(1, time_out_and_cancel)
        h.submit(patient(1))
        h.play()
        assert len(h.of(2)) == 1 and h.end(2).error_code == "UNAVAILABLE"
        stats = h.engine.stats()
        assert (stats.num_rejected, stats.num_cancelled) == (1, 0)


def test_each_request_ends_once_whoever_is_first(model: Path) -> None:
    """Starts, cancels, timeouts and refusals of several threads at the same moments."""
    accepted: list[int] = []

    def client(number: int) -> None:
        draw = random.Random(number)
        for req_id in range(100 * number, 100 * number + 60):
            request = (patient, urgent)[draw.randrange(2)](req_id, draw.choice((5, 40, 300)))
            try:
                h.submit(request, age_s=QUEUE_TIMEOUT_S - draw.choice((-1, 0, 0.002, 0.02, 5)))
            except QueueFullError:
                continue
            accepted.append(req_id)
            if draw.random() < 0.5:
                h.engine.cancel(draw.choice([req_id, draw.choice(accepted)]))

    with running(model, max_waiting_requests=20, max_num_seqs=8) as h:
        threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        h.engine.close(math.inf)
        stats = h.engine.stats()
        assert min(stats.num_rejected, stats.num_cancelled, stats.num_finished) > 0
        assert stats.num_started == len(accepted)
        ended = [o.req_id for o in h.outputs if o.finish_reason]
        assert sorted(ended) == sorted(accepted)


# ---- admission ----------------------------------------------------------------------------------


def refusal(h: Harness, request: Request) -> str:
    with pytest.raises(QueueFullError) as refused:
        h.submit(request)
    return str(refused.value)


def test_over_full_queue_refuses_at_once_and_harms_nobody(model: Path) -> None:
    refusals: list[str] = []

    def fill() -> None:
        h.submit(patient(2), patient(3))
        refusals.append(refusal(h, urgent(4)))
        refusals.append(refusal(h, urgent(5)))

    requests = [patient(i) for i in (1, 2, 3)]
    with running(model, max_waiting_requests=2) as h:
        h.at_slice(2, fill)
        h.submit(requests[0])
        h.play()
        assert "(max_waiting_requests=2): 2 requests with 600 prompt tokens wait" in refusals[0]
        assert h.of(4) == h.of(5) == []
        assert h.engine.stats().num_started == 3
        h.submit(urgent(4), urgent(5))
        h.play()
        assert h.engine.stats().num_started == 5
    expected = alone(model, *requests)
    for request in requests:
        assert h.answer(request.req_id) == expected[request.req_id]


def test_bound_on_tokens_counts_what_waits_and_lets_a_lone_prompt_pass(model: Path) -> None:
    refusals: list[str] = []

    def fill() -> None:
        h.submit(patient(2, 150))
        refusals.append(refusal(h, patient(3, 100)))
        h.submit(patient(3, 50))

    with running(model, max_waiting_tokens=200) as h:
        h.at_slice(2, fill)
        h.submit(patient(1, 450))  # nobody waits
        h.play()
        assert "max_waiting_tokens=200, this prompt has 100" in refusals[0]
        h.submit(patient(4, 450))
        assert {h.end(i).finish_reason for i in (1, 2, 3, 4)} == {FinishReason.LENGTH}


@pytest.mark.parametrize("leaves_by", ["cancel", "timeout"])
def test_who_leaves_the_queue_makes_room(model: Path, leaves_by: str) -> None:
    def fill() -> None:
        age_s = NEARLY_S if leaves_by == "timeout" else 0.0
        h.submit(patient(2), age_s=age_s)
        if leaves_by == "timeout":
            h.end(2)
            h.submit(patient(3))
        else:
            refusal(h, patient(3))
            h.engine.cancel(2)

    def fill_again() -> None:
        if leaves_by == "cancel":
            h.submit(patient(3))

    with running(model, max_waiting_requests=1) as h:
        h.at_slice(1, fill)
        h.at_slice(2, fill_again)
        h.submit(patient(1))
        h.play()
        assert h.of(2)[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.ERROR)
        assert h.end(3).finish_reason is FinishReason.LENGTH


# ---- requests that cannot be on time ------------------------------------------------------------


def test_infeasible_request_is_rejected_with_the_numbers_while_others_run(model: Path) -> None:
    hopeless = with_slo(urgent(2), ttft_s=1e-6)
    with running(model, on_infeasible="reject") as h:
        h.at_slice(2, lambda: h.submit(hopeless))
        h.submit(patient(1))
        h.play()
        (end,) = h.of(2)
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
        assert "ttft_slo_ms=0.001" in (end.error_message or "")
        assert "(on_infeasible=reject)" in (end.error_message or "")
        assert h.slices_at[h.outputs.index(end)] == 3
        assert h.engine.stats().num_rejected == 1
        h.submit(dataclasses.replace(hopeless, req_id=3))  # an idle device has nothing better to do
        assert h.end(3).finish_reason is FinishReason.LENGTH


def test_infeasible_request_is_demoted_by_default(model: Path) -> None:
    with running(model, starvation_share=0.0) as h:
        h.at_slice(2, lambda: h.submit(with_slo(urgent(2, 300), ttft_s=1e-6), patient(3, 300)))
        h.submit(patient(1))
        h.play()
        assert h.first_token_order() == [1, 3, 2]
        assert h.engine.stats().num_rejected == 0


def test_evicted_prefill_that_became_infeasible_is_rejected(model: Path) -> None:
    late = with_slo(patient(1, 200), ttft_s=0.001)
    memory = kv_bytes(256, NUM_LAYERS)
    # not served for being late either
    config = {"on_infeasible": "reject", "starvation_share": 0.0}
    with running(model, kv_cache_memory_bytes=memory, **config) as h:
        h.at_slice(2, lambda: h.submit(with_slo(patient(2, 200), rank=1)))
        h.submit(late, age_s=1.0)
        h.play()
        assert h.engine.stats().num_evictions == 1
        assert [o.error_code for o in h.of(1)] == ["UNAVAILABLE"]
        assert h.engine.stats().num_rejected == 1


# ---- classes and tenants ------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "order"), [(0, [1, 2]), (1, [2, 1])])
def test_higher_rank_goes_before_an_earlier_deadline(
    model: Path, rank: int, order: list[int]
) -> None:
    with running(model) as h:
        h.at_slice(2, lambda: h.submit(with_slo(patient(2), rank=rank)))
        h.submit(urgent(1, 300))
        h.play()
        assert h.first_token_order() == order
        assert h.engine.stats().num_preemptions == rank


@pytest.mark.parametrize(("fair_share", "place"), [(False, 10), (True, 6)])
def test_fair_share_lets_no_tenant_wait_for_another_ones_backlog(
    model: Path, fair_share: bool, place: int
) -> None:
    """Once they are over 2,048 tokens ahead: after six prompts of 400."""

    def of(tenant: str, request: Request) -> Request:
        return dataclasses.replace(request, tenant=tenant)

    backlog = [of("a", urgent(i, 400, max_tokens=1)) for i in range(10)]
    with running(model, fair_share=fair_share) as h:
        h.at_slice(0, lambda: h.submit(*backlog[1:], of("b", patient(20, 300))))
        h.submit(backlog[0])
        h.play()
        assert h.first_token_order().index(20) == place
