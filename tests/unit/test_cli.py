"""The command line, without a server or an engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowprefill import __version__
from flowprefill.cli import app
from flowprefill.server_layout import default_model_repository


def flowprefill(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from flowprefill.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_version_is_the_package_s() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.output.strip() == __version__


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    for command in ("serve", "generate", "bench", "version"):
        assert command in result.output


def test_help_loads_no_engine_and_no_client() -> None:
    code = "import sys, flowprefill.cli; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_failed_start_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = flowprefill("serve", "--model-repository", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"error: no model repository at {tmp_path / 'nowhere'}")
    assert "Traceback" not in done.stderr


def test_own_model_repository_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beside_source = default_model_repository()
    (tmp_path / "model_repository").mkdir()
    assert default_model_repository().resolve() == tmp_path / "model_repository"
    assert beside_source != default_model_repository()


def test_unknown_model_is_one_line_and_exit_code_1() -> None:
    done = flowprefill("generate", "--model", "/nonexistent.gguf", "--prompt", "x")
    assert done.returncode == 1
    assert "error: " in done.stderr and "/nonexistent.gguf" in done.stderr
    assert "Traceback" not in done.stderr
