"""The first signal asks for a stop, a second one forces it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

from flowprefill.stop_signals import StopSignals

FOLLOW = """
from flowprefill.stop_signals import StopSignals
signals = StopSignals()
signals.follow()
print("follows", flush=True)
signals.stopping.wait()
print("stopping", flush=True)
signals.forced.wait()
print("forced", flush=True)
"""


def test_a_second_signal_forces() -> None:
    signals = StopSignals()
    signals.note(signal.SIGTERM, 10.0)
    assert signals.stopping.is_set() and not signals.forced.is_set()
    signals.note(signal.SIGINT, 12.0)
    assert signals.forced.is_set()


def test_the_same_wish_said_twice_does_not_force() -> None:
    """`timeout` and make signal a process, and then its whole group."""
    signals = StopSignals()
    signals.note(signal.SIGTERM, 10.0)
    signals.note(signal.SIGTERM, 10.1)
    assert not signals.forced.is_set()


def test_other_signals_are_nothing_to_it() -> None:
    signals = StopSignals()
    signals.note(signal.SIGCHLD, 10.0)
    assert not signals.stopping.is_set()


def test_nohup_is_obeyed() -> None:
    command = ["nohup", sys.executable, "-c", FOLLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "follows\n"
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.kill()
    (ignored,) = re.findall(r"SigIgn:\s*(\w+)", status)
    assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1


def test_real_signals_are_followed() -> None:
    command = [sys.executable, "-c", FOLLOW]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "follows\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "stopping\n"
        while process.poll() is None:  # those that come too soon do not count
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        assert process.stdout.readline() == "forced\n"
