"""Limits of the stack, as processes started meanwhile see them."""

from __future__ import annotations

import resource
import subprocess
import sys

from flowprefill.thread_stacks import thread_stacks

SHOW = "import resource; print(resource.getrlimit(resource.RLIMIT_STACK)[0])"


def soft_limit_of_a_child() -> int:
    return int(subprocess.check_output([sys.executable, "-c", SHOW]))


def test_a_process_started_meanwhile_has_large_stacks_and_the_next_has_not() -> None:
    before = resource.getrlimit(resource.RLIMIT_STACK)
    size = before[0] + 2**20 if before[0] != resource.RLIM_INFINITY else 2**24
    with thread_stacks(size):
        assert soft_limit_of_a_child() == min(size, before[1] % 2**63)
    assert resource.getrlimit(resource.RLIMIT_STACK) == before
    assert soft_limit_of_a_child() == before[0]


def test_larger_stacks_are_left_as_they_are() -> None:
    with thread_stacks(2**24), thread_stacks(2**20):
        assert soft_limit_of_a_child() == 2**24
