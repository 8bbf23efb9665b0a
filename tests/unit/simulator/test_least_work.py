"""Least work: what a request costs at least, so that no simulated schedule beats the bound."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowprefill.granularity import Granularity
from flowprefill.scheduler.events import Arrival
from flowprefill.scheduler.policy import POLICIES
from flowprefill.simulator.least_work import most_cached_tokens, offline_bound
from flowprefill.simulator.platform import PAPER_PLATFORM
from flowprefill.simulator.replay import Replay, Setup, at_load
from flowprefill.workload import TraceRequest, clip_lengths, read_trace, window

TRACES = Path(__file__).parents[3] / "clients" / "traces"
KINDS = ("whole", "chunk:256", "chunk:512", "chunk:2048", "layer", "op", "tile")
COST = PAPER_PLATFORM.cost(Granularity("whole"))
BLOCK_TOKENS = PAPER_PLATFORM.block_tokens


def run(requests: list[TraceRequest], policy: str, kind: str) -> Replay:
    return Replay(requests, Setup(policy, Granularity.parse(kind))).run_all()


def num_on_time(replay: Replay) -> int:
    return sum(
        record.first_token_s <= record.arrival.arrival_s + record.arrival.ttft_slo_s
        for record in replay.records.values()
    )


def bound_of(replay: Replay) -> int:
    return offline_bound([r.arrival for r in replay.records.values()], COST, BLOCK_TOKENS)


prompts = st.tuples(st.integers(1, 700), st.integers(0, 3)).map(
    lambda drawn: (drawn[0] + drawn[1] * 512, drawn[1] * 512)
)


@settings(max_examples=200, deadline=None)
@given(st.lists(prompts, min_size=1, max_size=20), st.sampled_from(KINDS))
def test_no_pack_is_cheaper_than_its_members_shares(
    drawn: list[tuple[int, int]], kind: str
) -> None:
    pack, num_tokens = [], 0
    for end, start in drawn:
        if num_tokens + end - start <= COST.saturation_tokens:
            pack.append((end, start))
            num_tokens += end - start
    total_s = COST.timeline(pack, Granularity.parse(kind)).total_s
    assert sum(COST.least_prefill_s(*prompt) for prompt in pack) <= total_s


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40_000), st.integers(0, 20), st.sampled_from(KINDS))
def test_no_way_to_run_a_prompt_alone_is_cheaper(rows: int, num_blocks: int, kind: str) -> None:
    prompt = (rows + 512 * num_blocks, 512 * num_blocks)
    total_s = COST.timeline([prompt], Granularity.parse(kind)).total_s
    assert COST.least_prefill_s(*prompt) <= total_s


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 40_000), st.data())
def test_what_is_cached_is_not_paid(num_tokens: int, data: st.DataObject) -> None:
    num_cached = data.draw(st.integers(1, num_tokens - 1))
    assert COST.least_prefill_s(num_tokens, num_cached) < COST.least_prefill_s(num_tokens)


@pytest.mark.parametrize("num_tokens", [640, 2048, 8192, 50_000])
def test_the_least_is_close_to_what_long_prompts_take(num_tokens: int) -> None:
    assert COST.least_prefill_s(num_tokens) > 0.93 * COST.prefill_s(num_tokens)


@pytest.mark.parametrize("load", [0.8, 2.0])
@pytest.mark.parametrize(
    "name",
    ["qwentrace_like_synthetic_10min", "azure2023_mixed_20min", "mooncake_conversation_15min"],
)
def test_no_policy_at_any_granularity_beats_the_bound(name: str, load: float) -> None:
    requests = clip_lengths(window(read_trace(TRACES / f"{name}.csv"), 0, 150), 10**6, 1)
    loaded = at_load(requests, load)
    best = 0
    for policy in POLICIES:
        for kind in ("whole", "chunk:512", "chunk:2048", "op", "tile"):
            replay = run(loaded, policy, kind)
            best = max(best, num_on_time(replay))
            assert num_on_time(replay) <= bound_of(replay)
    assert best >= 0.85 * bound_of(replay), "a bound that says little"
    assert load < 2 or bound_of(replay) < 150


def test_a_bound_holds_with_tokens_to_decode() -> None:
    trace = read_trace(TRACES / "azure2023_mixed_20min.csv")
    loaded = at_load(clip_lengths(window(trace, 0, 100), 10**6, 20), 1.0)
    for policy in ("fcfs", "goodput"):
        replay = run(loaded, policy, "tile")
        assert num_on_time(replay) <= bound_of(replay)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Bursts of prompts with shared beginnings, on a device that is too slow for them."""
    requests = []
    arrival_s = 0.0
    for _ in range(draw(st.integers(1, 25))):
        arrival_s += draw(st.sampled_from([0.0, 0.001, 0.05, 0.3]))
        num_tokens = draw(st.sampled_from([1, 60, 300, 700, 1100, 2500, 6000]))
        num_blocks = -(-num_tokens // 512)
        family = draw(st.integers(0, 2))
        hashes = tuple(100 * family + block for block in range(num_blocks))
        kind = draw(st.sampled_from(["text", "image", "search"]))
        requests.append(TraceRequest(arrival_s, kind, num_tokens, 1, hashes))
    return requests


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from(sorted(POLICIES)), st.sampled_from(KINDS))
def test_no_policy_beats_the_bound_on_bursts_that_share_prefixes(
    requests: list[TraceRequest], policy: str, kind: str
) -> None:
    replay = run(requests, policy, kind)
    assert num_on_time(replay) <= bound_of(replay)
    records = list(replay.records.values())
    most = most_cached_tokens([record.arrival for record in records], BLOCK_TOKENS)
    for record, num_cached in zip(records, most, strict=True):
        if record.ttft_s <= record.arrival.ttft_slo_s:
            assert record.num_cached_tokens <= num_cached


def arrival(arrival_s: float, num_tokens: int, keys: tuple[int, ...], slo_s: float = 1) -> Arrival:
    return Arrival(0, arrival_s, num_tokens, 1, slo_s, 1.0, prefix_keys=keys)


def test_blocks_of_others_are_cached_up_to_the_first_that_nobody_has() -> None:
    first = arrival(0.0, 2100, (1, 2, 3, 4))
    second = arrival(0.5, 1600, (1, 2, 9))
    assert most_cached_tokens([first, second], 512) == [1024, 1024]
    assert most_cached_tokens([first, arrival(0.5, 2100, (9, 2, 3, 4))], 512) == [0, 0]


def test_blocks_of_requests_that_come_too_late_are_not_cached() -> None:
    early, late = arrival(0.0, 1100, (1, 2)), arrival(1.0, 1100, (1, 2))
    assert most_cached_tokens([early, late], 512) == [0, 1024]
    assert most_cached_tokens([early], 512) == [0]


def test_the_last_token_is_always_computed() -> None:
    same = [arrival(0.0, 1024, (1, 2)), arrival(0.0, 1024, (1, 2))]
    assert most_cached_tokens(same, 512) == [512, 512]
