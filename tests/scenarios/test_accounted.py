"""Every row has a test, and every test that is said to play a row exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
FILES = sorted(set(FOLDER.glob("test_*.py")) - {Path(__file__)})
NUM_ROWS = 30
ROW = re.compile(r"Row (\d+), \S+( PR)?#\d+: ")


def named_tests(file: Path) -> dict[str, str]:
    """Test functions of a file -> their docstrings."""
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def row_of(docstring: str) -> int | None:
    match = ROW.match(docstring)
    return int(match[1]) if match else None


def elsewhere(file: Path) -> dict[int, list[str]]:
    """Row -> ids of tests of other folders, as the file's ELSEWHERE says."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ELSEWHERE":
            found: dict[int, list[str]] = ast.literal_eval(node.value)
            return found
    return {}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_scenario_names_its_row_and_thread(file: Path) -> None:
    for name, docstring in named_tests(file).items():
        assert row_of(docstring), f"{name}: {docstring!r}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_tests_elsewhere_exist(file: Path) -> None:
    for ids in elsewhere(file).values():
        for test_id in ids:
            path, _, name = test_id.partition("::")
            assert name in named_tests(ROOT / path), test_id


def test_no_row_is_left_out() -> None:
    played = {row_of(docstring) for file in FILES for docstring in named_tests(file).values()}
    played |= {row for file in FILES for row in elsewhere(file)}
    assert played == set(range(1, NUM_ROWS + 1))
