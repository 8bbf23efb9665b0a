"""For all tests, before any of them imports torch."""

import os
import tempfile

from flowprefill.openmp import let_threads_sleep

pytest_plugins = ["tests.live_server"]
let_threads_sleep(os.environ)
# Profiles and weights of this session; never the user's own. Processes that tests start inherit it.
_cache = tempfile.TemporaryDirectory(prefix="flowprefill-tests-")
os.environ["XDG_CACHE_HOME"] = _cache.name
