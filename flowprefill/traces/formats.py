"""What a row of each known kind of trace file means. Knows no file: rows are mappings.

A CSV row has text values, a JSON object its own. Parsers raise ValueError, TypeError or KeyError
for a row that is wrong.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flowprefill.traces.request import TraceError, TraceRequest

COLUMNS = ("arrival_s", "type", "input_tokens", "output_tokens")
"""Of our own trace files."""
QWEN_BLOCK_TOKENS = 16

Row = Mapping[str, Any]
Parse = Callable[[Row], TraceRequest | None]
"""From a row to its request; None for one that is no request to replay."""

_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(\.\d+)?(?:\+00:00|Z)?")


@dataclass(frozen=True)
class TraceFormat:
    """A kind of trace file."""

    name: str
    columns: frozenset[str]
    """Columns of the CSV or keys of each JSON object that it is known by; there may be more."""
    make_parser: Callable[[Path], Parse]
    """For one file, whose rows are parsed in their order."""


def our_parser(path: Path) -> Parse:
    """Rows of our CSV, and the prefix hashes in `<name>_hashes.csv.gz` beside it if there are any.

    Raises TraceError if that file is broken.
    """
    hashes = _read_hashes(path.with_name(f"{path.stem}_hashes.csv.gz"))
    indices = itertools.count()

    def parse(row: Row) -> TraceRequest:
        return TraceRequest(
            float(row["arrival_s"]),
            row["type"],
            count(row, "input_tokens"),
            count(row, "output_tokens"),
            hashes.get(next(indices), ()),
        )

    return parse


def azure_parser(path: Path) -> Parse:
    """Azure LLM inference traces: times of day; the file's name ends in its service."""
    kind = path.stem.rpartition("_")[2]
    first: list[tuple[datetime, float]] = []

    def parse(row: Row) -> TraceRequest:
        match = _AZURE_TIME.fullmatch(row["TIMESTAMP"].strip())
        if match is None:
            raise ValueError(
                f"TIMESTAMP={row['TIMESTAMP']!r}: must be YYYY-MM-DD HH:MM:SS.fraction"
            )
        # By hand: Python takes 6 digits of a second at most, and there are 7.
        time, fraction_s = datetime.fromisoformat(match[1]), float(match[2] or 0)
        first[:] = first or [(time, fraction_s)]
        return TraceRequest(
            (time - first[0][0]).total_seconds() + fraction_s - first[0][1],
            kind,
            count(row, "ContextTokens"),
            count(row, "GeneratedTokens"),
        )

    return parse


def burstgpt_parser(path: Path) -> Parse:
    """BurstGPT: requests without an answer have failed, and are left out."""

    def parse(row: Row) -> TraceRequest | None:
        input_tokens, output_tokens = count(row, "Request tokens"), count(row, "Response tokens")
        if output_tokens == 0 and input_tokens >= 0:
            return None
        model, log = row["Model"].replace("-", ""), row["Log Type"].partition(" ")[0]
        kind = f"{model}_{log}".lower()
        return TraceRequest(float(row["Timestamp"]), kind, input_tokens, output_tokens)

    return parse


def mooncake_parser(path: Path) -> Parse:
    """Mooncake: milliseconds, blocks of 512 tokens; the file is named by its kind of requests."""
    kind = path.stem.removesuffix("_trace")

    def parse(row: Row) -> TraceRequest:
        return TraceRequest(
            number(row, "timestamp") / 1000,
            kind,
            count(row, "input_length"),
            count(row, "output_length"),
            prefix_names(row["hash_ids"]),
        )

    return parse


def qwen_parser(path: Path, new_tokens_only: bool = False) -> Parse:
    """QwenTrace: seconds, blocks of 16 tokens.

    new_tokens_only: as the FlowPrefill authors prepare it, a `text` request that follows another
        one has as its prompt only the blocks that it adds to that one's.
    """
    num_blocks: dict[int, int] = {}  # by chat_id

    def parse(row: Row) -> TraceRequest:
        input_tokens, names = count(row, "input_length"), prefix_names(row["hash_ids"])
        num_blocks[count(row, "chat_id")] = len(names)
        num_old = num_blocks.get(count(row, "parent_chat_id"), 0)
        request = TraceRequest(
            number(row, "timestamp"),
            str(row["type"]),
            input_tokens,
            count(row, "output_length"),
            names,
            QWEN_BLOCK_TOKENS,
        )
        if new_tokens_only and request.type == "text" and num_old:
            return _without_beginning(request, num_old)
        return request

    return parse


def _without_beginning(request: TraceRequest, num_blocks: int) -> TraceRequest:
    """The request without its first blocks, in whole blocks; one is left at least."""
    request.check()
    names = request.prefix_hashes[num_blocks:] or request.prefix_hashes[-1:]
    return TraceRequest(
        request.arrival_s,
        request.type,
        len(names) * request.block_tokens,
        request.output_tokens,
        names,
        request.block_tokens,
    )


def prefix_names(block_ids: Iterable[int]) -> tuple[int, ...]:
    """Names of blocks that stand for all that is before them too, from ids of contents alone.

    QwenTrace numbers blocks by content: the same id comes behind different beginnings, and twice
    in one prompt. 64-bit hashes, the same in every run: a number hashes to itself, not by a seed.
    """
    names: list[int] = []
    name = 0
    for block_id in block_ids:
        if type(block_id) is not int:
            raise ValueError(f"hash_ids: {block_id!r} is no whole number")
        name = hash((name, block_id))
        names.append(name)
    return tuple(names)


def count(row: Row, name: str) -> int:
    """A whole number, which CSV has as text. Raises ValueError or KeyError."""
    value = row[name]
    if isinstance(value, str):
        return int(value)
    if type(value) is not int:
        raise ValueError(f"{name}={value!r}: must be a whole number")
    return value


def number(row: Row, name: str) -> float:
    """A number of a JSON object. Raises ValueError or KeyError."""
    value = row[name]
    if type(value) not in (int, float):
        raise ValueError(f"{name}={value!r}: must be a number")
    return float(value)


def _read_hashes(path: Path) -> dict[int, tuple[int, ...]]:
    """Prefix hashes by row of the trace; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        with gzip.open(path, "rt", newline="", encoding="utf-8") as file:
            return {
                int(row["row"]): tuple(map(int, row["prefix_hash"].split()))
                for row in csv.DictReader(file)
            }
    except (OSError, EOFError, ValueError, KeyError, csv.Error) as error:
        raise TraceError(f"{path}: not a file of prefix hashes: {error!r}") from error


OURS = TraceFormat("CSV", frozenset(COLUMNS), our_parser)
AZURE = TraceFormat(
    "Azure", frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}), azure_parser
)
BURSTGPT = TraceFormat(
    "BurstGPT",
    frozenset({"Timestamp", "Model", "Request tokens", "Response tokens", "Log Type"}),
    burstgpt_parser,
)
MOONCAKE = TraceFormat(
    "Mooncake",
    frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),
    mooncake_parser,
)
QWEN = TraceFormat(
    "QwenTrace", MOONCAKE.columns | {"chat_id", "parent_chat_id", "type", "turn"}, qwen_parser
)
FORMATS = (OURS, AZURE, BURSTGPT, QWEN, MOONCAKE)
"""The first one whose columns a file has is the file's."""
