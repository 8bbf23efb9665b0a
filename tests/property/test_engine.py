"""Whatever arrives, whenever, under any policy and granularity, whoever loses its KV to others or
shares theirs, and whatever is cancelled, rejected or waits too long: each request ends exactly
once, with the tokens it gets alone, and the engine comes to rest in time."""

from __future__ import annotations

import dataclasses
import functools
import random
from pathlib import Path

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from flowprefill.request import SLO, FinishReason, Request
from flowprefill.sampling_params import SamplingParams
from flowprefill.scheduler.policy import POLICIES
from tests.engine_harness import QUEUE_TIMEOUT_S, Answer, alone, kv_bytes, running
from tests.factories import make_request, write_tiny_model
from tests.native_kernels import KERNELS, require_native

EXAMPLE_LIMIT_S = 20.0
"""Of one example, which takes some tenths of a second."""
NUM_LAYERS = 2
MAX_LEN = 512
NUM_KINDS = 24
GRANULARITIES = ("whole", "chunk:48", "layer", "op", "tile")
SLOS_S = (1e-6, 0.001, 0.005, 0.02, 0.4, 100.0)
"""From the impossible to the irrelevant."""
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.2, seed=1, logprobs=2),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS, max_len=MAX_LEN
    )


def of_kind(kind: int, req_id: int, slo: SLO | None = None, tenant: str = "") -> Request:
    """Requests of one kind get the same answer. Every other kind is sampled; prompts of four kinds
    in six begin alike, up to their last few tokens."""
    length = (1, 7, 31, 40, 90, 144, 150, 200)[kind // 3]
    start = make_request(length, seed=0 if kind % 3 else kind)
    own = make_request(1 + kind % 5, seed=100 + kind).prompt_token_ids
    return Request(
        req_id,
        [*start.prompt_token_ids, *own],
        dataclasses.replace(SAMPLINGS[kind % 2], max_tokens=(1, 3, 12, 40)[kind % 4]),
        slo or SLO(1.0, 1.0),
        arrival_s=0.0,
        tenant=tenant,
    )


@functools.cache
def answers_alone(model: Path, kernels: str) -> dict[int, Answer]:
    return alone(model, *(of_kind(kind, kind) for kind in range(NUM_KINDS)), kernels=kernels)


@pytest.fixture(scope="module", params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        require_native("bfloat16")
    return request.param


@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(sorted(POLICIES)),
    granularity=st.sampled_from(GRANULARITIES),
    num_requests=st.integers(1, 25),
    kv_tokens=st.sampled_from([MAX_LEN // 2, 400, 4 * MAX_LEN]),
    enable_prefix_caching=st.booleans(),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    max_decode_share=st.sampled_from([0.1, 0.5, 1.0]),
    max_slice_ms=st.sampled_from([4.0, 0.001]),
    is_fair=st.booleans(),
    on_infeasible=st.sampled_from(["demote", "demote", "reject"]),
    cancel_rate=st.sampled_from([0.0, 0.4]),
    timeout_rate=st.sampled_from([0.0, 0.3]),
    num_slices=st.sampled_from([0, 20, 200]),
)
def test_every_request_ends_once_with_the_tokens_it_gets_alone(
    model: Path,
    kernels: str,
    seed: int,
    policy: str,
    granularity: str,
    num_requests: int,
    kv_tokens: int,
    enable_prefix_caching: bool,
    max_num_seqs: int,
    max_decode_share: float,
    max_slice_ms: float,
    is_fair: bool,
    on_infeasible: str,
    cancel_rate: float,
    timeout_rate: float,
    num_slices: int,
) -> None:
    """num_slices: over which requests arrive and are cancelled."""
    expected = answers_alone(model, kernels)
    draw = random.Random(seed)
    kinds = [draw.randrange(NUM_KINDS) for _ in range(num_requests)]
    cancelled = {i for i in range(num_requests) if draw.random() < cancel_rate}
    old = {i for i in range(num_requests) if draw.random() < timeout_rate}
    with running(
        model,
        kernels=kernels,
        policy=policy,
        granularity=granularity,
        kv_cache_memory_bytes=kv_bytes(kv_tokens, NUM_LAYERS),
        enable_prefix_caching=enable_prefix_caching,
        max_num_seqs=max_num_seqs,
        max_decode_share=max_decode_share,
        max_slice_ms=max_slice_ms,
        fair_share=is_fair,
        on_infeasible=on_infeasible,
    ) as h:
        for req_id, kind in enumerate(kinds):
            slo = SLO(draw.choice(SLOS_S), draw.choice(SLOS_S), rank=draw.choice((0, 0, 0, 1)))
            request = of_kind(kind, req_id, slo, tenant=draw.choice("ab"))
            left_s = draw.choice((0.0, 0.002, 0.05)) if req_id in old else QUEUE_TIMEOUT_S
            submit = functools.partial(h.submit, request, age_s=QUEUE_TIMEOUT_S - left_s)
            h.at_slice(draw.randint(0, num_slices), submit)
        for req_id in cancelled:
            h.at_slice(draw.randint(0, num_slices), functools.partial(h.engine.cancel, req_id))
        h.play(EXAMPLE_LIMIT_S)
        stats = h.engine.stats()
        event(f"evictions: {stats.num_evictions > 0}")
        event(f"cached tokens: {stats.num_cached_tokens > 0}")
    for req_id, kind in enumerate(kinds):
        *_, last = h.of(req_id)
        if last.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert h.answer(req_id) == expected[kind]
            continue
        if last.finish_reason is FinishReason.CANCELLED:
            assert req_id in cancelled
        else:
            assert last.error_code == "UNAVAILABLE"
            assert req_id in old or on_infeasible == "reject"
        answer = h.answer(req_id)[:-1]
        assert answer == expected[kind][: len(answer)]
