"""For all tests, before any of them imports torch."""

import os
import tempfile
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

from flowprefill.openmp import let_threads_sleep

pytest_plugins = ["tests.live_server"]
let_threads_sleep(os.environ)
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # how Triton kernels run on a CPU; read at triton's import
# Profiles and weights of this session; never the user's own. Processes that tests start inherit it.
_cache = tempfile.TemporaryDirectory(prefix="flowprefill-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name


IN_PROCESS = ("accounted", "determinism", "head_of_line", "kv_memory", "priority", "sampling")
"""Files of scenarios that start no server."""


class ServerTestsTakeTurns(LoadScopeScheduling):  # type: ignore[misc]
    """Where tests run in parallel, those with a server are one piece of work: they share it, and
    each server has what is left of the machine to itself."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(tuple(f"tests/scenarios/test_{name}.py" for name in IN_PROCESS)):
            return nodeid
        return "server" if nodeid.startswith(("tests/e2e/", "tests/scenarios/")) else nodeid


@pytest.hookimpl
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ServerTestsTakeTurns:
    return ServerTestsTakeTurns(config, log)
