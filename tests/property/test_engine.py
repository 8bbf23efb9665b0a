"""Whatever arrives, whenever, under any policy and granularity, and whatever is cancelled: each
request ends exactly once, with the tokens it gets alone, and the engine comes to rest in time."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.request import FinishReason, Request
from flowprefill.sampling_params import SamplingParams
from flowprefill.scheduler.policy import POLICIES
from tests.engine_harness import Harness, running
from tests.factories import make_request, write_tiny_model

EXAMPLE_LIMIT_S = 20.0
"""Of one example, which takes some tenths of a second."""
NUM_KINDS = 12
GRANULARITIES = ("whole", "chunk:48", "layer", "op", "tile")
SLOS_S = (1e-6, 0.001, 0.005, 0.02, 0.4, 100.0)
"""From the impossible to the irrelevant."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2, max_len=256)


def of_kind(kind: int, req_id: int, ttft_slo_s: float = 1.0, tbt_slo_s: float = 1.0) -> Request:
    """Requests of one kind have the same tokens; half of the kinds are sampled."""
    sampling = SamplingParams(max_tokens=1 + kind, temperature=0.0)
    if kind % 2:
        sampling = SamplingParams(
            max_tokens=1 + kind, temperature=1.5, top_p=0.9, repetition_penalty=1.2, seed=kind
        )
    request = make_request(
        (1, 7, 40, 90, 140, 200)[kind // 2],
        ttft_slo_s,
        req_id=req_id,
        seed=kind,
        tbt_slo_s=tbt_slo_s,
    )
    return dataclasses.replace(request, sampling=sampling)


@functools.cache
def tokens_alone(model: Path) -> list[list[int | None]]:
    """Tokens of each kind, one request at a time."""
    with running(model) as h:
        for kind in range(NUM_KINDS):
            h.submit(of_kind(kind, kind))
            h.end(kind)
    return [h.tokens(kind) for kind in range(NUM_KINDS)]


@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(sorted(POLICIES)),
    granularity=st.sampled_from(GRANULARITIES),
    num_requests=st.integers(1, 30),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    max_decode_share=st.sampled_from([0.1, 0.5, 1.0]),
    cancel_rate=st.sampled_from([0.0, 0.4]),
    num_slices=st.sampled_from([0, 20, 200]),
)
def test_every_request_ends_once_with_the_tokens_it_gets_alone(
    model: Path,
    seed: int,
    policy: str,
    granularity: str,
    num_requests: int,
    max_num_seqs: int,
    max_decode_share: float,
    cancel_rate: float,
    num_slices: int,
) -> None:
    """num_slices: over which requests arrive and are cancelled."""
    expected = tokens_alone(model)
    draw = random.Random(seed)
    kinds = [draw.randrange(NUM_KINDS) for _ in range(num_requests)]
    cancelled = {i for i in range(num_requests) if draw.random() < cancel_rate}
    with running(
        model,
        policy=policy,
        granularity=granularity,
        max_num_seqs=max_num_seqs,
        max_decode_share=max_decode_share,
    ) as h:
        for req_id, kind in enumerate(kinds):
            request = of_kind(kind, req_id, draw.choice(SLOS_S), draw.choice(SLOS_S))
            h.at_slice(draw.randint(0, num_slices), functools.partial(h.submit, request))
        for req_id in cancelled:
            h.at_slice(draw.randint(0, num_slices), functools.partial(h.engine.cancel, req_id))
        h.play(EXAMPLE_LIMIT_S)
    for req_id, kind in enumerate(kinds):
        check(h, req_id, expected[kind], may_be_cancelled=req_id in cancelled)


def check(h: Harness, req_id: int, expected: list[int | None], may_be_cancelled: bool) -> None:
    *_, last = h.of(req_id)
    if last.finish_reason is FinishReason.CANCELLED:
        assert may_be_cancelled
        tokens = h.tokens(req_id)[:-1]
        assert tokens == expected[: len(tokens)]
    else:
        assert last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        assert h.tokens(req_id) == expected
