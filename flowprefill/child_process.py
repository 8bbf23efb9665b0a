"""Python processes of ours that end with the process that started them."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flowprefill.openmp import let_threads_sleep


def spawn_module(
    module: str, fds: Sequence[int], output: int | None = None
) -> subprocess.Popen[str]:
    """Run a module with file descriptors that it inherits; their numbers are its arguments.

    output: where stdout and stderr go, as of Popen; None = where ours go
    Raises OSError if it cannot run.
    """
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONSAFEPATH": "1",  # no module of the working directory gets in front of ours
    }
    let_threads_sleep(env)
    return subprocess.Popen(
        [sys.executable, "-u", "-m", module, *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.PIPE,  # never written: its end tells the kernel that we are gone
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        env=env,
        encoding="utf-8",
        errors="replace",
    )


def end_with_parent() -> None:
    """Let the kernel end this process when the parent is gone.

    Whoever reads from the parent sees an EOF, but needs the interpreter lock for it, which a wedged
    process may hold. Our stdin is a pipe that only the parent holds open; its end raises SIGIO,
    which is fatal.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGIO})
    stdin = sys.stdin.fileno()
    fcntl.fcntl(stdin, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(stdin, fcntl.F_SETFL, fcntl.fcntl(stdin, fcntl.F_GETFL) | os.O_ASYNC)
