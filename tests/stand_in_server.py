"""What stands for a peer's interpreter: a script that serves completions as vLLM's server does.

A prompt has as many tokens as words, and takes its time for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

_SCRIPT = """#!{python}
import subprocess, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from flowprefill.bench.peers.openvino_server import CompletionsServer, Token

child = subprocess.Popen(["sleep", "600"])  # as an engine's process is
Path({folder!r}, "child").write_text(str(child.pid))

def submit(prompt, max_tokens):
    time.sleep(len(prompt.split()) / {tokens_per_s})
    for index in range(max_tokens):
        yield Token(" w", len(prompt.split()), index == max_tokens - 1)

port = int(sys.argv[sys.argv.index("--port") + 1])
CompletionsServer(port, submit, "stand-in").serve_forever()
"""


def write_stand_in_server(folder: Path, tokens_per_s: int = 30_000) -> Path:
    """The interpreter; it writes the id of a process that it starts to `child` in that folder."""
    path = folder / "stand_in_python"
    root = str(Path(__file__).parents[1])
    path.write_text(
        _SCRIPT.format(
            python=sys.executable, root=root, folder=str(folder), tokens_per_s=tokens_per_s
        )
    )
    path.chmod(0o755)
    return path
