"""How torch's CPU threads wait for each other. Must be settled before torch is imported.

By default an OpenMP thread spins at the end of each parallel region. Where any other process wants
a core (tritonserver, the client, a second engine), the spinning thread keeps the core from the one
it waits for, and a prefill becomes ten times slower (docs/log.md). Sleeping costs microseconds.
"""

from __future__ import annotations

from collections.abc import MutableMapping

_WAIT_POLICY = "OMP_WAIT_POLICY"


def let_threads_sleep(environ: MutableMapping[str, str]) -> None:
    """Ask for sleeping threads, unless the operator has chosen already."""
    environ.setdefault(_WAIT_POLICY, "passive")
