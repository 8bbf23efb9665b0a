"""The example of docs/hooks.md is short and runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "hooks.md"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(example.splitlines()) < 40
    exec(compile(example, str(PAGE), "exec"), {"__name__": "example"})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("urgent: ") and second.startswith("long: ")
