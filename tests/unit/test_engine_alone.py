"""The engine needs neither tritonserver nor its client, nor anything but torch for attention."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, importlib.abc, sys

REFUSED = {
    "tritonclient", "tritonserver", "pytriton", "triton_python_backend_utils", "flash_attn",
    "fastapi", "uvicorn", "aiohttp", "grpc", "transformers",
}

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{name} is not here", name=name)
        return None

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
found = REFUSED & {name.partition(".")[0] for name in sys.modules}
assert not found, found
print("imported", len(sys.argv) - 1)
"""
ENGINE = (
    "flowprefill",
    "flowprefill.engine",
    "flowprefill.engine_process",
    "flowprefill.engine_server",
    "flowprefill.generate",
    "flowprefill.cli",
    "flowprefill.simulator.replay",
    "flowprefill.programs.native_operators",
    "flowprefill.executor.device",
)
BENCHES = (
    "flowprefill.bench.gpu.bench",
    "flowprefill.bench.gpu.check",
    "flowprefill.bench.gpu.measure",
    "flowprefill.bench.gpu.goodput",
    "flowprefill.bench.gpu.reference",
    "flowprefill.bench.gpu.kernel_checks",
    "flowprefill.bench.gpu.program_checks",
)


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *modules]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_engine_and_benches_import_without_server_client_and_transformers() -> None:
    done = run(*ENGINE, *BENCHES)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"imported {len(ENGINE) + len(BENCHES)}\n"


def test_what_needs_the_client_is_seen_to_need_it() -> None:
    done = run("flowprefill.replay.targets")
    assert done.returncode != 0 and "tritonclient" in done.stderr
