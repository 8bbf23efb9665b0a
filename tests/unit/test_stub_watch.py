"""Dead model processes are told from living ones, and from those that end in order."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flowprefill import stub_watch
from flowprefill.stub_watch import StubWatch, dead_stubs


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A program of a stub's name."""
    path = tmp_path / "triton_python_backend_stub"
    sleep = shutil.which("sleep")
    assert sleep
    shutil.copy(sleep, path)
    return path


def wait_ended(process: subprocess.Popen[bytes]) -> None:
    """Without reaping it."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


def test_a_stub_that_died_is_found_until_it_is_waited_for(stub: Path) -> None:
    process = subprocess.Popen([stub, "600"])
    assert dead_stubs(os.getpid()) == set()
    process.kill()
    wait_ended(process)
    assert dead_stubs(os.getpid()) == {process.pid}
    process.wait()
    assert dead_stubs(os.getpid()) == set()


def test_other_dead_children_are_no_stubs() -> None:
    process = subprocess.Popen(["sleep", "0"])
    wait_ended(process)
    assert dead_stubs(os.getpid()) == set()
    process.wait()


def test_it_must_be_dead_for_some_looks(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stub_watch, "_LOOK_S", 0.0)
    process = subprocess.Popen([stub, "0"])
    wait_ended(process)
    watch = StubWatch(os.getpid())
    assert [watch.has_dead_stub() for _ in range(4)] == [False, False, True, True]
    process.wait()
    assert not watch.has_dead_stub()


def test_a_kernel_that_lists_no_children_is_told_of_once(tmp_path: Path) -> None:
    lines: list[str] = []
    (tmp_path / "7" / "task" / "7").mkdir(parents=True)
    watch = StubWatch(7, lines.append, tmp_path)
    assert not watch.has_dead_stub() and not watch.has_dead_stub()
    (line,) = lines
    assert line.startswith(f"warning: no {tmp_path}/7/task/7/children (CONFIG_PROC_CHILDREN")
    (tmp_path / "7" / "task" / "7" / "children").touch()
    StubWatch(7, lines.append, tmp_path)
    StubWatch(8, lines.append, tmp_path)
    assert lines == [line]
