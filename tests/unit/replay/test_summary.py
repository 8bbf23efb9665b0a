"""Tables, warnings and record files of a replay."""

from __future__ import annotations

import csv
import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flowprefill.replay.errors import ReplayError
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.record_files import COLUMNS, check_records_path, write_records
from flowprefill.replay.records import ReplayRecord
from flowprefill.replay.summary import figures, make_table, server_line, warnings
from flowprefill.workload import Objective

TEXT, FILE = Objective("text", 0.25, 0.1), Objective("file", 6.0, 0.2)


def record(req_id: int, *token_s: float, goal: Objective = TEXT, **others: Any) -> ReplayRecord:
    """Due at its id's second and sent a millisecond later; tokens came so long after that."""
    planned = PlannedRequest(req_id, float(req_id), 20, 3, goal, type="chat")
    sent_s = req_id + 0.001
    return ReplayRecord(planned, sent_s, tuple(sent_s + t for t in token_s), **others)


RECORDS = [
    record(0, 0.2, 0.25, 0.35, ended_s=0.4, num_input_tokens=20, server_ttft_s=0.15),
    record(1, 0.2, 0.5, 0.6, num_input_tokens=21),
    record(2, 5.0, 5.1, goal=FILE),
    record(3, error="UNAVAILABLE: full", goal=FILE),
    record(4, 0.3, 0.31, 0.32),
]


def test_figures_say_what_was_asked_for_and_what_came() -> None:
    plan = [r.planned for r in RECORDS]
    found = figures([*plan, plan[0]], RECORDS)
    assert (found["num_planned"], found["num_requests"], found["num_failed"]) == (6, 5, 1)
    assert found["attainment"] == 0.6
    assert found["attainment_with_tbt"] == 0.4  # request 1 had a gap of 300 ms
    assert found["goodput"] == 0.75
    assert found["offered_rate"] == 1.25
    assert (found["num_short_answers"], found["num_wrong_prompts"]) == (1, 1)
    assert not found["void"]
    line = (
        "TTFT in the server: p50 150.0, p99 150.0 ms; the client saw more by p50 50.0, p99 50.0 ms"
    )
    assert server_line(found) == line
    assert server_line(figures(plan, RECORDS[1:])) is None


def test_warnings_name_what_spoils_the_figures() -> None:
    found = figures([r.planned for r in RECORDS], RECORDS)
    assert [warning.split()[0:3] for warning in warnings(found)] == [
        ["1", "answers", "are"],
        ["1", "prompts", "have"],
    ]
    late = {**found, "void": True, "send_lag_p99_ms": 7.25}
    assert warnings(late)[0].startswith("VOID: requests were sent late (p99 7.2 ms, limit 5 ms)")
    clean = figures([RECORDS[0].planned], RECORDS[:1])
    assert warnings(clean) == []


def test_table_has_a_row_per_class_and_one_for_all() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(make_table(RECORDS))
    rows = {
        cells[0]: cells[1:]
        for line in console.export_text().splitlines()
        if len(cells := [cell.strip() for cell in line.strip("│┃ ").split("│")]) > 5
    }
    assert rows["text"][:5] == ["3", "66.7%", "200.0", "280.0", "298.0"]
    assert rows["file"][:3] == ["2", "50.0%", "never"]
    assert rows["all"][-1] == "1"


def test_records_are_a_row_each(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "records.csv"
    check_records_path(path)
    write_records(path, RECORDS)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == 5
    first, failed = rows[0], rows[3]
    assert first["class"] == "text" and first["type"] == "chat"
    assert (first["due_s"], first["sent_s"], first["send_lag_s"]) == ("0.0", "0.001", "0.001")
    assert (first["ttft_s"], first["gap_p50_s"], first["gap_max_s"]) == ("0.2", "0.075", "0.1")
    assert (first["server_ttft_s"], failed["server_ttft_s"]) == ("0.15", "")
    assert (first["output_tokens"], first["num_output_tokens"]) == ("3", "3")
    assert (first["end_s"], first["met"], first["error"]) == ("0.4", "True", "")
    assert (failed["ttft_s"], failed["gap_max_s"], failed["met"]) == ("", "", "False")
    assert failed["error"] == "UNAVAILABLE: full"


def test_a_place_that_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="is a directory"):
        check_records_path(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match=r"records\.csv: "):
        check_records_path(tmp_path / "file" / "records.csv")


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is here")
def test_parquet_without_pyarrow_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="needs pyarrow"):
        check_records_path(tmp_path / "records.parquet")
    assert not list(tmp_path.iterdir())


def test_parquet_holds_the_same_values(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "records.parquet"
    write_records(path, RECORDS)
    table = parquet.read_table(path)
    assert table.column_names == list(COLUMNS)
    assert table["ttft_s"].to_pylist()[:4] == [0.2, 0.2, 5.0, None]
