"""How many files and connections a process may have open. Knows nothing of servers."""

from __future__ import annotations

import resource

MAX_OPEN_FILES = 2**16
"""Shells give 1,024, and each request has a connection, over HTTP two: its client's and ours."""


def allow_many_files() -> None:
    """Raise the limit of this process, and of those that it starts, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
