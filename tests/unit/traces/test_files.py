"""Trace files in every known format: what is read, and what is refused by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowprefill.traces.files import load_trace, read_trace
from flowprefill.traces.request import TraceError, TraceRequest
from flowprefill.workload import objective

TRACES = Path(__file__).parents[3] / "clients" / "traces"

# The first lines of the original (Azure/AzurePublicDataset, CC BY 4.0).
AZURE_CODE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0781490,110,27
"""
BURSTGPT_HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
QWEN_COMMON = [1089, 1090, 1091]


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


def json_lines(*rows: dict[str, Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def qwen(chat_id: int, input_length: int, hash_ids: list[int], **others: Any) -> dict[str, Any]:
    return {
        "chat_id": chat_id,
        "parent_chat_id": -1,
        "timestamp": 0.25 * chat_id,
        "input_length": input_length,
        "output_length": 5,
        "type": "text",
        "turn": 1,
        "hash_ids": hash_ids,
        **others,
    }


def mooncake(timestamp: int, input_length: int, hash_ids: list[int]) -> dict[str, Any]:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    return dict(zip(names, (timestamp, input_length, 500, hash_ids), strict=True))


def num_shared(a: TraceRequest, b: TraceRequest) -> int:
    """Blocks of the common beginning."""
    pairs = list(zip(a.prefix_hashes, b.prefix_hashes, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def test_azure_times_count_from_the_first_to_a_tenth_of_a_microsecond(tmp_path: Path) -> None:
    path = write(tmp_path, "AzureLLMInferenceTrace_code.csv", AZURE_CODE)
    requests = read_trace(path)
    # the rows of our slice of the same file, which has milliseconds
    assert [(r.type, r.input_tokens, r.output_tokens) for r in requests] == [
        ("code", 4808, 10),
        ("code", 3180, 8),
        ("code", 110, 27),
    ]
    gaps = [r.arrival_s for r in requests]
    assert gaps == pytest.approx([0, 0.052, 0.098189], abs=1e-7)
    assert not requests[0].prefix_hashes


def test_azure_of_another_year_and_across_midnight(tmp_path: Path) -> None:
    rows = "2024-05-10 23:59:59.500000+00:00,20,3\n2024-05-11 00:00:01+00:00,30,4\n"
    path = write(tmp_path, "conv.csv", AZURE_CODE.splitlines()[0] + "\n" + rows)
    first, second = read_trace(path)
    assert second.arrival_s - first.arrival_s == pytest.approx(1.5)


def test_burstgpt_leaves_out_what_failed_and_says_how_many(tmp_path: Path) -> None:
    rows = (
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,GPT-4,300,0,300,API log\n"
        "45,GPT-4,0,0,0,API log\n"
        "118.5,GPT-4,417,276,693,API log\n"
    )
    trace = load_trace(write(tmp_path, "BurstGPT_1.csv", BURSTGPT_HEADER + rows))
    assert (trace.format_name, trace.num_dropped) == ("BurstGPT", 2)
    assert trace.requests == [
        TraceRequest(5.0, "chatgpt_conversation", 472, 18),
        TraceRequest(118.5, "gpt4_api", 417, 276),
    ]


def test_burstgpt_with_session_columns_is_read_by_name(tmp_path: Path) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"  # fmt: skip # noqa: E501
    path = write(tmp_path, "BurstGPT_3.csv", header + "5,ab-c,0.4,GPT-4,472,18,490,API log\n")
    assert read_trace(path) == [TraceRequest(5.0, "gpt4_api", 472, 18)]


def test_mooncake_original_is_our_slice_of_it(tmp_path: Path) -> None:
    """Its first lines, as published, beside the first rows of the slice that is shipped."""
    lengths = [6758, 7322, 7236, 2290]
    hashes = [[0, *range(1, 14)], [0, *range(14, 28)], [0, *range(28, 42)], [0, *range(42, 46)]]
    rows = [mooncake(0, n, ids) for n, ids in zip(lengths, hashes, strict=True)]
    rows.append(mooncake(3000, 13544, [0, *range(219, 245)]))
    original = read_trace(write(tmp_path, "conversation_trace.jsonl", json_lines(*rows)))
    ours = read_trace(TRACES / "mooncake_conversation_15min.csv")
    ours = [*ours[:4], ours[10]]
    assert [r.arrival_s for r in original] == [r.arrival_s for r in ours] == [0, 0, 0, 0, 3]
    assert [r.input_tokens for r in original] == [r.input_tokens for r in ours]
    assert {r.block_tokens for r in original} == {512}
    assert {r.type for r in original} == {"conversation"}
    for a, b in zip(original, ours, strict=True):
        assert len(a.prefix_hashes) == len(b.prefix_hashes)
        assert num_shared(original[0], a) == num_shared(ours[0], b)


def test_qwen_is_read_with_blocks_of_16_tokens(tmp_path: Path) -> None:
    rows = [
        qwen(11, 93, [*QWEN_COMMON, 1542, 1543, 1544], timestamp=3.804, output_length=380),
        qwen(14, 80, [*QWEN_COMMON, 1545, 1546], type="search"),
    ]
    trace = load_trace(write(tmp_path, "qwen_traceA_blksz_16.jsonl", json_lines(*rows)))
    search, text = sorted(trace.requests, key=lambda r: r.type)
    assert trace.format_name == "QwenTrace"
    assert (text.arrival_s, text.input_tokens, text.output_tokens) == (3.804, 93, 380)
    assert text.block_tokens == 16
    assert num_shared(text, search) == 3
    assert [objective(r).name for r in (text, search)] == ["text", "search"]


def test_qwen_ids_of_contents_share_nothing_behind_another_beginning(tmp_path: Path) -> None:
    """Real prompts end in the same id (1086), and one holds an id twice (3353)."""
    rows = [qwen(0, 48, [1, 3353, 1086]), qwen(1, 48, [2, 3353, 1086]), qwen(2, 48, [1, 7, 7])]
    a, b, c = read_trace(write(tmp_path, "q.jsonl", json_lines(*rows)))
    assert not set(a.prefix_hashes) & set(b.prefix_hashes)
    assert num_shared(a, c) == 1
    assert len(set(c.prefix_hashes)) == 3


def test_qwen_follow_ups_can_count_only_what_they_add(tmp_path: Path) -> None:
    rows = [
        qwen(0, 45, [1, 2, 3]),
        qwen(1, 90, [1, 2, 3, 4, 5, 6], parent_chat_id=0, turn=2),
        qwen(2, 90, [1, 2, 3, 4, 5, 6], parent_chat_id=0, turn=2, type="search"),
        qwen(3, 45, [1, 2, 3], parent_chat_id=0, turn=2),
        qwen(4, 45, [1, 2, 3], parent_chat_id=77, turn=2),  # its parent is not in the file
        qwen(5, 95, [1, 2, 3, 4, 5, 7], parent_chat_id=0, turn=2),
    ]
    path = write(tmp_path, "q.jsonl", json_lines(*rows))
    assert [r.input_tokens for r in read_trace(path)] == [45, 90, 90, 45, 45, 95]
    requests = load_trace(path, new_tokens_only=True).requests
    assert [r.input_tokens for r in requests] == [45, 48, 90, 16, 45, 48]
    for request in requests:
        request.check()
    assert num_shared(requests[1], requests[5]) == 2
    azure = write(tmp_path, "a.csv", AZURE_CODE)
    with pytest.raises(TraceError, match="Azure trace does not say what follows"):
        load_trace(azure, new_tokens_only=True)


def test_originals_that_are_not_sorted_are_sorted(tmp_path: Path) -> None:
    rows = [mooncake(2000, 10, [1]), mooncake(1000, 20, [2])]
    path = write(tmp_path, "m.jsonl", json_lines(*rows))
    assert [r.input_tokens for r in read_trace(path)] == [20, 10]


def test_blank_lines_and_a_byte_order_mark_are_no_faults(tmp_path: Path) -> None:
    text = "\ufeff" + json_lines(mooncake(0, 10, [1])) + "\n  \n"
    assert len(read_trace(write(tmp_path, "m.jsonl", text))) == 1
    text = "\ufeffarrival_s,type,input_tokens,output_tokens\n0,chat,9,3\n\n"
    assert len(read_trace(write(tmp_path, "o.csv", text))) == 1


GOOD_QWEN = json_lines(qwen(0, 20, [1, 2]))
GOOD_MOONCAKE = json_lines(mooncake(0, 600, [1, 2]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (AZURE_CODE + "yesterday,5,5\n", r":5: TIMESTAMP='yesterday': must be YYYY"),
        (AZURE_CODE + "2023-13-16 18:17:04.0,5,5\n", r":5: month must be in 1..12"),
        (AZURE_CODE + "2023-11-16 18:17:05.0,5\n", r":5: must have 3 fields"),
        (AZURE_CODE + "2023-11-16 18:17:05.0,5,5,5\n", r":5: must have 3 fields"),
        (AZURE_CODE + "2023-11-16 18:17:05.0,0,5\n", r":5: tokens=0,5: must be > 0"),
        (AZURE_CODE + "2023-11-16 18:17:02.0,5,5\n", r":5: arrival_s=-1"),
        (BURSTGPT_HEADER + "soon,GPT-4,4,5,9,API log\n", r":2: could not convert"),
        (BURSTGPT_HEADER + "5,GPT-4,-4,0,9,API log\n", r":2: tokens=-4,0"),
        (BURSTGPT_HEADER + "5,GPT-4,4.5,5,9,API log\n", r":2: invalid literal"),
        (GOOD_QWEN + json_lines(qwen(1, 40, [1, 2])), r":2: 2 prefix hashes for 3 blocks"),
        (GOOD_QWEN + json_lines(qwen(1, 20, [1, "x"])), r":2: hash_ids: 'x' is no whole number"),
        (GOOD_QWEN + json_lines(qwen(True, 20, [1, 2])), r":2: chat_id=True: must be a whole"),
        (GOOD_QWEN + json_lines(mooncake(0, 20, [1, 2])), r":2: no chat_id"),
        (GOOD_QWEN + json_lines(qwen(1, 20, [1, 2], timestamp="1")), r":2: timestamp='1': must be"),
        (GOOD_QWEN + json_lines(qwen(1, 20, None)), r":2: .*not iterable"),  # type: ignore[arg-type]
        (GOOD_MOONCAKE + '{"timestamp": 1,\n', r":2: Expecting"),
        (GOOD_MOONCAKE + "[1]\n", r":2: must be a JSON object"),
        (GOOD_MOONCAKE + json_lines(mooncake(0, 600, [1])), r":2: 1 prefix hashes for 2 blocks"),
        ('{"timestamp": 1, "tokens": 5}\n', r":1: not a known trace: the first line must be arri"),
        ('{"timestamp": \n', r":1: Expecting value"),
        ("time,tokens\n0,5\n", r":1: not a known trace"),
        ("", r":1: not a known trace"),
        ("\0\n", r":1: "),
    ],
)
def test_a_wrong_line_is_refused_by_its_number(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "some_trace", text)
    with pytest.raises(TraceError, match=f"some_trace{message}"):
        read_trace(path)


@pytest.mark.parametrize(
    "text", [AZURE_CODE.splitlines()[0], BURSTGPT_HEADER + "45,GPT-4,300,0,300,API log\n"]
)
def test_a_trace_of_no_requests_is_refused(tmp_path: Path, text: str) -> None:
    """Whoever reads it would divide by their number."""
    with pytest.raises(TraceError, match=r"some_trace: no requests"):
        read_trace(write(tmp_path, "some_trace", text))


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\x1f\x8b\xff\xfe")
    with pytest.raises(TraceError, match=r"binary.csv:1: .*utf-8"):
        read_trace(path)
