"""Traces: what is read, what is refused, and what scaling and clipping keep."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from flowprefill.workload import (
    DOCUMENT_S_PER_TOKEN,
    TraceError,
    TraceRequest,
    clip_lengths,
    objective,
    read_trace,
    scale_lengths,
    scale_rate,
    spread_ticks,
    window,
)

HEADER = "arrival_s,type,input_tokens,output_tokens\n"
QWEN_TYPES = {"text", "search", "image", "file"}
TRACES = Path(__file__).parents[2] / "clients" / "traces"


def write(directory: Path, rows: str, hashes: str | None = None) -> Path:
    path = directory / "some_trace.csv"
    path.write_text(HEADER + rows)
    if hashes is not None:
        with gzip.open(directory / "some_trace_hashes.csv.gz", "wt") as file:
            file.write("row,prefix_hash\n" + hashes)
    return path


def shared_tokens(a: TraceRequest, b: TraceRequest) -> int:
    """Length of the common prefix in whole blocks."""
    pairs = zip(a.prefix_hashes, b.prefix_hashes, strict=False)
    return a.block_tokens * next(
        (i for i, (x, y) in enumerate(pairs) if x != y),
        min(len(a.prefix_hashes), len(b.prefix_hashes)),
    )


@pytest.mark.parametrize(
    ("name", "num_requests", "mean_input_tokens", "span_s", "types"),
    [
        (
            "qwentrace_like_synthetic_10min",
            3622,
            1709.4,
            599.3,
            {"text", "search", "image", "file"},
        ),
        ("azure2023_mixed_20min", 10414, 1530.6, 1199.9, {"conv", "code"}),
        ("azure2023_conv_30min", 10108, 1243.3, 1799.9, {"conv"}),
        ("mooncake_conversation_15min", 2728, 13483.8, 900.0, {"chat"}),
    ],
)
def test_shipped_traces_are_what_their_page_says(
    name: str, num_requests: int, mean_input_tokens: float, span_s: float, types: set[str]
) -> None:
    requests = read_trace(TRACES / f"{name}.csv")
    assert len(requests) == num_requests
    mean = sum(r.input_tokens for r in requests) / num_requests
    assert mean == pytest.approx(mean_input_tokens, abs=0.05)
    assert requests[-1].arrival_s - requests[0].arrival_s == pytest.approx(span_s, abs=0.06)
    assert {r.type for r in requests} == types
    assert all(bool(r.prefix_hashes) == (name.startswith("mooncake")) for r in requests)


def test_every_shipped_file_is_on_the_page() -> None:
    page = (TRACES / "README.md").read_text()
    assert all(path.name in page for path in TRACES.glob("*.csv*"))


def test_a_prefix_hash_names_everything_before_it_too() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in read_trace(TRACES / "mooncake_conversation_15min.csv"):
        for i, prefix_hash in enumerate(request.prefix_hashes):
            assert (
                before.setdefault(prefix_hash, request.prefix_hashes[:i])
                == (request.prefix_hashes[:i])
            )


def test_hashes_belong_to_the_rows_they_number(tmp_path: Path) -> None:
    path = write(tmp_path, "0,chat,1500,3\n0.5,chat,512,1\n", "1,7\n0,4 5 6\n")
    assert [r.prefix_hashes for r in read_trace(path)] == [(4, 5, 6), (7,)]


@pytest.mark.parametrize(
    ("rows", "hashes", "message"),
    [
        ("0,chat,0,3\n", None, "csv:2: tokens=0,3"),
        ("0,chat,9,3\n1,chat,5\n", None, "csv:3:"),
        ("0,chat,many,3\n", None, "csv:2: invalid literal"),
        ("nan,chat,9,3\n", None, "csv:2: arrival_s=nan"),
        ("-1,chat,9,3\n", None, "csv:2: arrival_s=-1"),
        ("2,chat,9,3\n1,chat,9,3\n", None, "sorted by arrival_s"),
        ("0,chat,1500,3\n", "0,4 5\n", "csv:2: 2 prefix hashes for 3 blocks"),
        ("0,chat,1500,3\n", "0,4 x\n", "not a file of prefix hashes"),
    ],
)
def test_a_broken_trace_is_refused_by_line(
    tmp_path: Path, rows: str, hashes: str | None, message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        read_trace(write(tmp_path, rows, hashes))


def test_other_columns_and_missing_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    with pytest.raises(TraceError, match="no such trace"):
        read_trace(path)
    path.write_text("time,tokens\n")
    with pytest.raises(TraceError, match="first line must be arrival_s,type"):
        read_trace(path)


def test_a_window_starts_at_zero_and_keeps_gaps() -> None:
    requests = [TraceRequest(10.0 + i * i, "conv", 5, 1) for i in range(6)]
    assert [r.arrival_s for r in window(requests, 2, 3)] == [0, 5, 12]


@pytest.mark.parametrize(("start", "num_requests"), [(4, 3), (-1, 2), (0, 7), (0, 0)])
def test_a_window_outside_the_trace_is_refused(start: int, num_requests: int) -> None:
    requests = [TraceRequest(float(i), "conv", 5, 1) for i in range(6)]
    with pytest.raises(TraceError, match="of a trace of 6 requests"):
        window(requests, start, num_requests)


def test_a_doubled_rate_halves_gaps_and_keeps_lengths() -> None:
    requests = [TraceRequest(float(i), "conv", 5 + i, 1) for i in range(3)]
    scaled = scale_rate(requests, 2.0)
    assert [r.arrival_s for r in scaled] == [0, 0.5, 1]
    assert [r.input_tokens for r in scaled] == [5, 6, 7]


def test_recorded_ticks_are_spread_up_to_the_next() -> None:
    times = [0.0, 0.0, 0.0, 3.0, 3.0, 9.0]
    requests = [TraceRequest(t, "chat", 1 + i, 1) for i, t in enumerate(times)]
    spread = spread_ticks(requests)
    assert [r.arrival_s for r in spread] == [0, 1, 2, 3, 6, 9]
    assert [r.input_tokens for r in spread] == [1, 2, 3, 4, 5, 6]
    last_is_full = [*requests, TraceRequest(9.0, "chat", 7, 1)]
    assert [r.arrival_s for r in spread_ticks(last_is_full)] == [0, 1, 2, 3, 6, 9, 12]


@pytest.mark.parametrize("times", [[0.0, 0.0, 0.5, 0.7, 2.0], [1.0, 1.0, 1.0], [4.0], []])
def test_finely_recorded_arrivals_stay(times: list[float]) -> None:
    requests = [TraceRequest(t, "conv", 5, 1) for t in times]
    assert spread_ticks(requests) == requests


def test_of_the_shipped_traces_only_mooncake_was_recorded_in_ticks() -> None:
    for path in TRACES.glob("*.csv"):
        requests = read_trace(path)
        spread = spread_ticks(requests)
        assert (spread != requests) == path.name.startswith("mooncake")
        if spread != requests:
            arrivals = [r.arrival_s for r in spread]
            assert arrivals == sorted(set(arrivals))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_senseless_scales_are_refused(scale: float) -> None:
    with pytest.raises(TraceError, match="must be finite and > 0"):
        scale_rate([], scale)
    with pytest.raises(TraceError, match="must be finite and > 0"):
        scale_lengths([], scale)


@pytest.mark.parametrize("block_tokens", [16, 512])
@pytest.mark.parametrize("scale", [0.25, 0.3, 0.9, 1.0, 1.5, 3.0])
def test_scaled_prompts_share_the_scaled_prefix(scale: float, block_tokens: int) -> None:
    a = TraceRequest(0.0, "chat", 20 * block_tokens, 100, tuple(range(20)), block_tokens)
    hashes_b = (*range(12), *range(100, 104))
    b = TraceRequest(1.0, "chat", 16 * block_tokens - 7, 100, hashes_b, block_tokens)
    scaled_a, scaled_b = scale_lengths([a, b], scale)
    assert scaled_a.input_tokens == round(a.input_tokens * scale)
    for request in (scaled_a, scaled_b):
        request.check()
        assert request.block_tokens == block_tokens
        assert len(set(request.prefix_hashes)) == len(request.prefix_hashes)
    exact = scale * shared_tokens(a, b)
    assert exact - block_tokens < shared_tokens(scaled_a, scaled_b) <= exact


def test_scaling_leaves_one_token_at_least() -> None:
    (request,) = scale_lengths([TraceRequest(0.0, "conv", 3, 2)], 0.01)
    assert (request.input_tokens, request.output_tokens) == (1, 1)


def test_clipping_keeps_the_beginning_of_a_prompt() -> None:
    requests = [
        TraceRequest(0.0, "chat", 2000, 90, (1, 2, 3, 4)),
        TraceRequest(0.0, "chat", 600, 9, (1, 5)),
    ]
    long, short = clip_lengths(requests, 1000, 50)
    assert (long.input_tokens, long.output_tokens, long.prefix_hashes) == (1000, 50, (1, 2))
    assert short == requests[1]
    fine = TraceRequest(0.0, "text", 40, 9, (1, 2, 3), block_tokens=16)
    assert clip_lengths([fine], 32, 50)[0].prefix_hashes == (1, 2)
    with pytest.raises(TraceError, match="must be > 0"):
        clip_lengths(requests, 0, 50)


@pytest.mark.parametrize(
    ("kind", "num_tokens", "name", "ttft_s"),
    [
        ("text", 9000, "text", 0.25),
        ("image", 300, "image", 0.5),
        ("search", 300, "search", 4.0),
        ("file", 300, "file", 6.0),
        ("conv", 1024, "short", 0.25),
        ("conv", 1025, "medium", 0.5),
        ("code", 2049, "long", 4.0),
        ("chat", 16_385, "document", DOCUMENT_S_PER_TOKEN * 16_385),
    ],
)
def test_objectives_go_by_type_or_else_by_length(
    kind: str, num_tokens: int, name: str, ttft_s: float
) -> None:
    request = TraceRequest(0.0, kind, num_tokens, 1)
    assert (objective(request).name, objective(request).ttft_s) == (name, ttft_s)
    assert objective(request, 0.5).ttft_s == ttft_s / 2
    assert objective(request, 0.5).tbt_s == objective(request).tbt_s / 2
