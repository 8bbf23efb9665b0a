"""Python processes of ours that end with the process that started them: both sides of one."""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from flowprefill.openmp import let_threads_sleep

Kind = TypeVar("Kind")
Body = TypeVar("Body")

EXIT_CRASHED = 1
EXIT_ORPHANED = 3
STACK_DUMP_SIGNAL = signal.SIGUSR1


def spawn_module(
    module: str, fds: Sequence[int] = (), output: int | None = None
) -> tuple[subprocess.Popen[str], socket.socket]:
    """Run a module; returns it and our end of a socket whose other end it inherits.

    Its arguments are the number of that file descriptor and those of `fds`, which it inherits too.
    output: where stdout and stderr go, as of Popen; None = where ours go
    Raises OSError if it cannot run.
    """
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            return _popen(module, [theirs.fileno(), *fds], output), ours
    except BaseException:
        ours.close()
        raise


def _popen(module: str, fds: Sequence[int], output: int | None) -> subprocess.Popen[str]:
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


def wait_exit(process: subprocess.Popen[str], timeout_s: float) -> int | None:
    """Its exit code, once it is reaped; None if it does not end."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def describe_exit(code: int) -> str:
    """In words; negative: a signal, as of Popen."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def live_with_parent() -> None:
    """In the child, first of all: only the parent ends it, which may also ask where it stands."""
    # a Ctrl-C or a service stop reaches the whole process group; the parent says when to end
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_parent()
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)


def _end_with_parent() -> None:
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


def handle_messages(
    receive: Callable[[], Iterable[tuple[Kind, Body]]], handle: Callable[[Kind, Body], None]
) -> NoReturn:
    """In the child, on a thread of its own: whatever the parent sends, until the process ends.

    receive: raises EOFError when the parent is gone; what `handle` raises ends the process.
    """
    try:
        while True:
            for kind, body in receive():
                handle(kind, body)
    except EOFError:
        os._exit(EXIT_ORPHANED)
    except BaseException:
        traceback.print_exc()
        os._exit(EXIT_CRASHED)
