"""`flowprefill replay` against the real server, over both of its protocols."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flowprefill.bench.report import VOID_EXIT_CODE
from flowprefill.server import TritonServer
from flowprefill_client import Client
from tests.e2e.conftest import MODEL

FLOWPREFILL = Path(sys.executable).parent / "flowprefill"
LENGTHS = (600, 20, 560, 33, 540, 1)
"""Prompt tokens; those with an even index begin with the same 512."""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{0.2 * i},text,{n},{1 + i % 3}\n" for i, n in enumerate(LENGTHS)]
    path.write_text("arrival_s,type,input_tokens,output_tokens\n" + "".join(rows))
    with gzip.open(tmp_path / "trace_hashes.csv.gz", "wt") as file:
        file.write("row,prefix_hash\n0,1 2\n2,1 3\n4,1 4\n")
    return path


@pytest.mark.parametrize("target", ["grpc", "generate_stream"])
def test_a_short_trace_is_answered_in_full(
    server: TritonServer, client: Client, trace: Path, tmp_path: Path, target: str
) -> None:
    url = server.grpc_url if target == "grpc" else server.http_url
    path = tmp_path / "records.csv"
    seed = "1" if target == "grpc" else "2"  # prompts that the server has not seen
    before = client.engine_stats()
    command = [str(FLOWPREFILL), "replay", "--trace", str(trace), "--target", target, "--url", url,
               "--model", MODEL, "--slo-scale", "400", "--records", str(path),
               "--seed", seed]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    # void where other work holds the machine; what came back is right all the same
    assert done.returncode in (0, VOID_EXIT_CODE), done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["errors"] == {}
    assert result["attainment"] == 1.0
    assert (result["num_short_answers"], result["num_wrong_prompts"]) == (0, 0)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["num_input_tokens"]) for row in rows] == list(LENGTHS)
    assert [int(row["num_output_tokens"]) for row in rows] == [1, 2, 3, 1, 2, 3]
    assert all(float(row["ttft_s"]) > float(row["server_ttft_s"]) > 0 for row in rows)
    assert result["ttft_outside_server_s"]["p50"] > 0
    cached = client.engine_stats()["num_cached_tokens"] - before["num_cached_tokens"]
    assert cached >= 2 * 512 - 2 * 64  # all whole blocks of what two prompts share with a third


def test_a_refused_request_is_told_by_the_server_s_code(server: TritonServer, trace: Path) -> None:
    for target, url in (("grpc", server.grpc_url), ("generate_stream", server.http_url)):
        command = [str(FLOWPREFILL), "replay", "--trace", str(trace), "--target", target,
                   "--url", url, "--model", MODEL, "--requests", "1",
                   "--output-tokens", "1000000"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["errors"] == {"INVALID_ARG": 1}, done.stdout
