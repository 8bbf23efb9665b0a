"""Records of a replay as a file: one row per request, CSV or Parquet."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flowprefill.metrics import percentile
from flowprefill.replay.errors import ReplayError
from flowprefill.replay.records import ReplayRecord

_PARQUET = ".parquet"


def check_records_path(path: Path) -> None:
    """Raise ReplayError if records could not be written there: before a replay, not behind it."""
    if path.suffix == _PARQUET:
        try:
            importlib.import_module("pyarrow.parquet")
        except ImportError as error:
            raise ReplayError(f"{path}: Parquet needs pyarrow, CSV does not: {error}") from error
    if path.is_dir():
        raise ReplayError(f"{path}: is a directory")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ReplayError(f"{path}: {error.strerror}") from error


def write_records(path: Path, records: Sequence[ReplayRecord]) -> None:
    """Write CSV, or Parquet where the name ends in .parquet; see check_records_path."""
    rows = [record_row(record) for record in records]
    columns = list(COLUMNS)
    if path.suffix == _PARQUET:
        pyarrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        table = pyarrow.table({name: [row[name] for row in rows] for name in columns})
        parquet.write_table(table, path)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


COLUMNS = {
    "req_id": "from 0, in the order of the trace",
    "type": "as in the trace",
    "class": "SLO class",
    "due_s": "when it was to be sent, seconds from the start of the replay",
    "sent_s": "when it was sent",
    "send_lag_s": "sent_s - due_s",
    "input_tokens": "asked for",
    "output_tokens": "asked for",
    "num_input_tokens": "by the server's count",
    "num_output_tokens": "that came",
    "ttft_s": "from sent_s to the first token",
    "server_ttft_s": "arrival at the server to the first token by its own clock, if it says so",
    "ttft_slo_s": "its objective",
    "gap_p50_s": "median gap between two tokens",
    "gap_max_s": "longest gap between two tokens",
    "tbt_slo_s": "the objective of every gap",
    "end_s": "when the answer was complete or had failed",
    "met": "first token in time, and no failure",
    "error": "code and message",
}
"""Columns and what they mean; empty where there is nothing, as ttft_s without a token."""


def record_row(record: ReplayRecord) -> dict[str, Any]:
    """The values of COLUMNS. Times to the microsecond."""
    planned, goal = record.planned, record.planned.objective
    gaps_s = record.times.tbt_s
    return {
        "req_id": planned.req_id,
        "type": planned.type,
        "class": goal.name,
        "due_s": _round(planned.due_s),
        "sent_s": _round(record.sent_s),
        "send_lag_s": _round(record.send_lag_s),
        "input_tokens": planned.input_tokens,
        "output_tokens": planned.output_tokens,
        "num_input_tokens": record.num_input_tokens,
        "num_output_tokens": len(record.token_s),
        "ttft_s": _round(record.ttft_s) if record.token_s else None,
        "server_ttft_s": record.server_ttft_s,
        "ttft_slo_s": _round(goal.ttft_s),
        "gap_p50_s": _round(percentile(gaps_s, 50)) if gaps_s else None,
        "gap_max_s": _round(max(gaps_s)) if gaps_s else None,
        "tbt_slo_s": _round(goal.tbt_s),
        "end_s": None if record.ended_s is None else _round(record.ended_s),
        "met": record.is_on_time,
        "error": record.error,
    }


def _round(value: float) -> float:
    return round(value, 6)
