"""What all benchmarks share: the error, facts of the run, the model to use, the JSON line."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flowprefill.config import EngineConfig
from flowprefill.errors import FlowPrefillError
from flowprefill.host_cpu import cpu_model, num_cpus
from flowprefill.server_layout import default_model_repository

_PACKAGES = ("flowprefill", "flowprefill_backend", "flowprefill_client")
_SOURCE_SUFFIXES = frozenset({".py", ".cpp", ".h"})
VOID_EXIT_CODE = 3
"""Requests were sent so late that no figure counts."""


class BenchmarkError(FlowPrefillError):
    """The benchmark cannot give a figure that means what it should."""


def load_model_json(path: Path | None) -> EngineConfig:
    """The configuration in `path`, or the default model's, with the paths in it made absolute."""
    if path is None:
        path = default_model_repository() / "smollm2" / "1" / "model.json"
    config, _ = EngineConfig.from_file(path)
    return config.with_absolute_paths(path.parent)


def describe_run(config: EngineConfig, seed: int) -> dict[str, Any]:
    """Machine, model, seed and commit: what a figure must be quoted with."""
    return {
        "cpu": cpu_model(),
        "cpus": num_cpus(),
        "model": config.model,
        "dtype": config.dtype,
        "device": config.device,
        "seed": seed,
        "commit": _commit(),
    }


def describe_machine(config: EngineConfig) -> str:
    """Model and machine, for the title of a picture of what was measured."""
    model = Path(config.model).name.removeprefix("package:")
    return f"{model} on {cpu_model()}, {num_cpus()} cores, measured"


def code_digest(packages: Sequence[Path] | None = None) -> str:
    """Of all source in these folders; None: our packages. With other code, figures are of another
    program."""
    digest = hashlib.sha256()
    for folder in _our_packages() if packages is None else packages:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in _SOURCE_SUFFIXES):
            digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _our_packages() -> list[Path]:
    """Folders of those that are installed."""
    specs = [find_spec(name) for name in _PACKAGES]
    places = (spec.submodule_search_locations or () for spec in specs if spec)
    return [Path(folder) for folders in places for folder in folders]


def print_json(result: dict[str, Any], json_out: Path | None) -> None:
    """Print `result` as one line on standard output; write it to `json_out` too if given."""
    line = json.dumps(result)
    if json_out is not None:
        json_out.parent.mkdir(parents=True, exist_ok=True)
        json_out.write_text(line + "\n", encoding="utf-8")
    print(line, flush=True)


def print_void(send_lag_p99_ms: float) -> None:
    """Say on standard output that no figure counts. send_lag_p99_ms: of the latest replay"""
    from rich.console import Console

    from flowprefill.replay.summary import void_line

    Console(width=150).print(void_line(send_lag_p99_ms), style="bold red", markup=False)


def _commit() -> str | None:
    """The commit of the source tree that is running; None outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        run = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return run.stdout.strip()
