"""Streams beside prefills: steps when they are due, without decisions, and what ends or interrupts
them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flowprefill.request import FinishReason, Request
from tests.engine_harness import (
    Answer,
    Harness,
    alone,
    kv_bytes,
    patient,
    running,
    urgent,
    with_slo,
)
from tests.factories import TINY_VOCAB_SIZE, write_tiny_model

NUM_LAYERS = 2
EOS_ID = TINY_VOCAB_SIZE - 1
CONFIG: dict[str, Any] = {"max_slice_ms": 0.001, "max_decode_share": 1.0}
"""Many slices, and steps nearly as often as they are due."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


def stream(req_id: int, max_tokens: int = 60, **sampling: Any) -> Request:
    """A request whose tokens are always due, so steps run beside any prefill."""
    return with_slo(urgent(req_id, 20, max_tokens=max_tokens, **sampling), tbt_s=1e-6)


LONG = patient(9, 400)


@functools.cache
def answers_alone(model: Path) -> dict[int, Answer]:
    return alone(model, stream(1), stream(2), LONG, urgent(3))


def in_step(h: Harness, action: Callable[[], object]) -> None:
    """Once, before a slice of a decode step beside the long prefill; found midway in the step."""
    passes = h.engine._runner.passes
    is_done = []

    def look() -> None:
        if passes.step and passes.prefills and not is_done:
            is_done.append(True)
            action()

    for number in range(300):
        h.at_slice(number, look)


def test_steps_beside_a_prefill_need_no_decisions(model: Path) -> None:
    with running(model, **CONFIG) as h:
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.submit(stream(1))
        h.play()
        order = [o.req_id for o in h.outputs]
        num_beside = order[: order.index(9)].count(1) - 1
        assert num_beside > 15
        assert h.engine.stats().num_decisions < 10
    for req_id in (1, 9):
        assert h.answer(req_id) == answers_alone(model)[req_id]


def test_steps_wait_for_a_prefill_while_they_are_not_due(model: Path) -> None:
    with running(model, **CONFIG) as h:
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.submit(with_slo(stream(1), tbt_s=3000.0))
        h.play()
        assert [o.req_id for o in h.outputs][:3] == [1, 9, 1]


@pytest.mark.parametrize("is_eos", [False, True])
def test_stream_that_ends_beside_a_prefill_is_gone_at_the_next_boundary(
    model: Path, is_eos: bool
) -> None:
    if is_eos:
        bias = {EOS_ID: 100.0}
        short = stream(1, ignore_eos=False, min_tokens=7, logit_bias=bias)
    else:
        short = stream(1, max_tokens=8)
    seen: list[tuple[int, int]] = []

    def look() -> None:
        stats = h.engine.stats()
        seen.append((stats.num_prefilling, stats.num_decoding))

    with running(model, **CONFIG) as h:
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.at_token(1, 8, lambda: h.at_slice(h.device.num_slices, look))
        h.submit(short)
        h.play()
        assert h.of(1)[-1].finish_reason is (FinishReason.STOP if is_eos else FinishReason.LENGTH)
        assert seen == [(1, 0)]
    assert h.answer(9) == answers_alone(model)[9]


def test_stream_cancelled_beside_a_prefill_gets_nothing_more(model: Path) -> None:
    with running(model, **CONFIG) as h:
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.at_token(1, 6, lambda: h.engine.cancel(1))
        h.submit(stream(1))
        h.play()
        assert h.first_token_order() == [1, 9]
        assert len(h.tokens(1)) == 7
        assert h.of(1)[-1].finish_reason is FinishReason.CANCELLED
    assert h.answer(1)[:6] == answers_alone(model)[1][:6]
    assert h.answer(9) == answers_alone(model)[9]


def test_prefill_cancelled_between_its_steps_leaves_the_stream_alone(model: Path) -> None:
    with running(model, **CONFIG) as h:
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.at_token(1, 6, lambda: h.engine.cancel(9))
        h.submit(stream(1))
        h.play()
        assert [o.finish_reason for o in h.of(9)] == [FinishReason.CANCELLED]
    assert h.answer(1) == answers_alone(model)[1]


def test_step_left_midway_beside_a_prefill_goes_on_behind_the_newcomer(model: Path) -> None:
    with running(model, **CONFIG) as h:
        in_step(h, lambda: h.submit(urgent(3)))
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.submit(stream(1), stream(2))
        h.play()
        assert h.engine.stats().num_preemptions == 1
        assert h.of(9)[-1].num_preemptions == 1
        assert h.first_token_order() == [1, 2, 3, 9]
    for req_id in (1, 2, 3, 9):
        assert h.answer(req_id) == answers_alone(model)[req_id]


@pytest.mark.parametrize("cancelled", [{1}, {2}, {1, 2}])
def test_member_cancelled_in_a_step_beside_a_prefill(model: Path, cancelled: set[int]) -> None:
    with running(model, **CONFIG) as h:
        in_step(h, lambda: [h.engine.cancel(req_id) for req_id in cancelled])
        h.at_token(1, 1, lambda: h.submit(LONG))
        h.submit(stream(1), stream(2))
        h.play()
        for req_id in cancelled:
            assert h.of(req_id)[-1].finish_reason is FinishReason.CANCELLED
            num_tokens = len(h.of(req_id)) - 1
            assert h.answer(req_id)[:-1] == answers_alone(model)[req_id][:num_tokens]
    for req_id in {1, 2, 9} - cancelled:
        assert h.answer(req_id) == answers_alone(model)[req_id]


# ---- growing beside a prefill -------------------------------------------------------------------

FULL = {"kv_cache_memory_bytes": kv_bytes(256, NUM_LAYERS), **CONFIG}


@pytest.mark.parametrize("is_stream_urgent", [True, False])
def test_stream_that_needs_a_block_beside_a_prefill(model: Path, is_stream_urgent: bool) -> None:
    """The two hold all blocks; whoever is less urgent gives them up."""
    of_stream, of_prompt = (urgent, patient) if is_stream_urgent else (patient, urgent)
    growing = with_slo(of_stream(1, 31, max_tokens=20), tbt_s=1e-6)
    prompt = of_prompt(2, 14 * 16, max_tokens=1)
    with running(model, **FULL) as h:
        h.at_token(1, 1, lambda: h.submit(prompt))
        h.submit(growing)
        h.play()
        assert h.engine.stats().num_evictions == 1
        ends = [o.req_id for o in h.outputs if o.finish_reason]
        assert ends == ([1, 2] if is_stream_urgent else [2, 1])
    expected = alone(model, growing, prompt)
    assert {i: h.answer(i) for i in (1, 2)} == expected
