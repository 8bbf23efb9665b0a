"""For all tests, before any of them imports torch."""

import os
import tempfile
from pathlib import Path

from flowprefill.openmp import let_threads_sleep

pytest_plugins = ["tests.live_server"]
let_threads_sleep(os.environ)
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # how Triton kernels run on a CPU; read at triton's import
# Profiles and weights of this session; never the user's own. Processes that tests start inherit it.
_cache = tempfile.TemporaryDirectory(prefix="flowprefill-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
