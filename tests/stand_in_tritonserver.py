"""What stands for tritonserver where its launcher is tested: a program that is ready at once.

It answers as a server without a model.
"""

from __future__ import annotations

import sys
from pathlib import Path

from flowprefill.preflight import python_minor

_SCRIPT = """#!{python}
import signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

is_used = threading.Event()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self):
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")
        is_used.set()

    def log_message(self, *args):
        pass

options = dict(option.split("=", 1) for option in sys.argv[1:])
server = ThreadingHTTPServer(("127.0.0.1", int(options["--http-port"])), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
is_used.wait()
print({log!r}, flush=True)
{then}
"""


def lay_out_tritonserver(folder: Path, script: str = "") -> Path:
    """An installation as in NVIDIA's image; returns its `tritonserver`, which is `script`."""
    python_dir = folder / "backends" / "python"
    python_dir.mkdir(parents=True)
    (folder / "bin").mkdir()
    binary = folder / "bin" / "tritonserver"
    binary.write_text(script)
    binary.chmod(0o755)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (python_dir / name).write_text(name)
    stub = python_dir / "triton_python_backend_stub"
    stub.write_bytes(b"\x7fELF..libpython" + python_minor().encode() + b".so.1.0\0")
    return binary


def stand_in(log: str, then: str) -> str:
    """The program. Once it was asked for its models it logs a text, and then does `then`."""
    return _SCRIPT.format(python=sys.executable, log=log, then=then)
