"""The soak, in its form of two minutes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.test_bench import FLOWPREFILL


@pytest.mark.timeout(420)
def test_two_minutes_of_mixed_traffic_with_two_engine_kills(tmp_path: Path) -> None:
    """Memory is judged loosely: two minutes are warm-up for the most part. `bench soak` itself
    takes half an hour and holds all to 2%."""
    json_out = tmp_path / "soak.json"
    command = [str(FLOWPREFILL), "bench", "soak", "--minutes", "2", "--json-out", str(json_out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(json_out.read_text())
    assert result["is_met"]
    assert (result["num_hung"], result["num_changed"], result["num_wrong"]) == (0, 0, 0)
    assert result["problems"] == []
    assert result["at_rest"]["busy"] == {} and result["at_rest"]["num_lost"] == 0
    assert result["at_rest"]["num_evictions"] >= 1 and result["stop_problems"] == []
    assert len(result["restarts_s"]) == 2
    assert result["num_requests"] > 50
    left = {"leaves", "cancelled by id", "disconnects"}
    assert set(result["requests"]) == {"control", "chat", "document", "crowd", "bad"} | left
    watched = {"tritonserver", "stub", "engine", "OpenAI endpoint", "/dev/shm"}
    assert set(result["growth"]) >= watched
    assert max(result["unready_s"]) < 10  # what the metrics page says of a dead engine
