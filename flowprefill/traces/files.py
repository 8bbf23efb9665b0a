"""Reading trace files: which format one has is seen by its content, and faults are named by line.

CSV with the columns of formats.COLUMNS, sorted by arrival, is our own format; where prompts share
prefixes, `<name>_hashes.csv.gz` beside it names the prefix blocks of each row. The originals of the
Azure 2023, BurstGPT, Mooncake and QwenTrace traces are read as they are published.
"""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TextIO

from flowprefill.traces.formats import (
    COLUMNS,
    FORMATS,
    OURS,
    QWEN,
    Parse,
    Row,
    TraceFormat,
    qwen_parser,
)
from flowprefill.traces.request import TraceError, TraceRequest


@dataclass(frozen=True)
class Trace:
    """All that a trace file says."""

    requests: list[TraceRequest]
    """Sorted by arrival; one at least."""
    format_name: str
    num_dropped: int = 0
    """Rows that are no request to replay: BurstGPT's failed ones."""


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a trace file in any known format, sorted by arrival; one at least.

    Raises TraceError naming file and line for anything that is not such a trace.
    """
    return load_trace(path).requests


def load_trace(path: Path, new_tokens_only: bool = False) -> Trace:
    """Read a trace file.

    new_tokens_only: see formats.qwen_parser; only QwenTrace says what follows what.
    Raises TraceError naming file and line for anything that is not such a trace.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no such trace")
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = _open_rows(path, file)
        format_ = _recognise(path, rows.columns)
        if new_tokens_only and format_ is not QWEN:
            raise TraceError(f"{path}: a {format_.name} trace does not say what follows what")
        parse = qwen_parser(path, True) if new_tokens_only else format_.make_parser(path)
        requests, num_dropped = _parse_all(path, rows, parse)
    if format_ is not OURS:
        requests.sort(key=attrgetter("arrival_s"))
    elif any(a.arrival_s > b.arrival_s for a, b in itertools.pairwise(requests)):
        raise TraceError(f"{path}: rows must be sorted by arrival_s")
    if not requests:
        raise TraceError(f"{path}: no requests")
    return Trace(requests, format_.name, num_dropped)


def _parse_all(path: Path, rows: _Rows, parse: Parse) -> tuple[list[TraceRequest], int]:
    """All requests, and how many rows are none."""
    requests: list[TraceRequest] = []
    num_dropped = 0
    try:
        for row in rows:
            request = parse(row)
            if request is None:
                num_dropped += 1
                continue
            request.check()
            requests.append(request)
    except KeyError as error:
        raise TraceError(f"{path}:{rows.line}: no {error.args[0]}") from error
    except (ValueError, TypeError, csv.Error) as error:
        raise TraceError(f"{path}:{rows.line}: {error}") from error
    return requests, num_dropped


def _recognise(path: Path, columns: frozenset[str]) -> TraceFormat:
    for format_ in FORMATS:
        if format_.columns <= columns:
            return format_
    names = ", ".join(f.name for f in FORMATS if f is not OURS)
    raise TraceError(
        f"{path}:1: not a known trace: the first line must be {','.join(COLUMNS)}, or as in the "
        f"originals of {names}"
    )


class _CsvRows:
    """Rows of a CSV file, and at which line it is."""

    def __init__(self, file: TextIO) -> None:
        self._reader = csv.DictReader(file)
        self.columns = frozenset(self._reader.fieldnames or ())

    @property
    def line(self) -> int:
        return self._reader.line_num

    def __iter__(self) -> Iterator[Row]:
        for row in self._reader:
            if None in row or None in row.values():
                raise ValueError(f"must have {len(self._reader.fieldnames or ())} fields")
            yield row


class _JsonRows:
    """Objects of a file of JSON lines, and at which line it is."""

    def __init__(self, file: TextIO, first: str) -> None:
        self.line = 1
        self._file = file
        self.columns = frozenset(self._parse(first))

    def __iter__(self) -> Iterator[Row]:
        for number, line in enumerate(self._file, 1):
            self.line = number
            if line.strip():
                yield self._parse(line)

    @staticmethod
    def _parse(line: str) -> Row:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("must be a JSON object")
        return row


_Rows = _CsvRows | _JsonRows


def _open_rows(path: Path, file: TextIO) -> _Rows:
    try:
        first = file.readline()
        file.seek(0)
        return _JsonRows(file, first) if first.startswith("{") else _CsvRows(file)
    except (ValueError, csv.Error) as error:
        raise TraceError(f"{path}:1: {error}") from error
