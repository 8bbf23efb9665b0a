"""Stacks of the threads of processes that are started here. Knows nothing of servers."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def thread_stacks(num_bytes: int) -> Iterator[None]:
    """Processes started in this block give each thread a stack of so many bytes at least.

    The C library takes the limit of the main stack for all threads; memory is only used as it is
    touched. Where the hard limit is lower, that is the size.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    # Without a limit threads get 2 MB.
    if soft == resource.RLIM_INFINITY or soft < wanted:
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
