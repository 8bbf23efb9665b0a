"""Which engines to measure beside ours: `--peer NAME=PYTHON[:MODEL]` and files of such."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flowprefill.bench.report import BenchmarkError
from flowprefill.config import EngineConfig
from flowprefill.host_cpu import num_cpus
from flowprefill.programs.model_spec import resolve_model_path

WORKERS = ("openvino", "vllm", "transformers")
"""Modules beside this one, for worker.py to load in the peer's interpreter."""
_KEYS = {"name", "python", "model", "worker", "options"}


@dataclass(frozen=True)
class PeerSpec:
    """One engine to start."""

    name: str
    """As it is called in results."""
    python: Path
    """The interpreter that has it."""
    model: Path
    """The folder that it loads."""
    worker: str
    """One of WORKERS."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """What its worker passes on to it."""


@dataclass(frozen=True)
class Conditions:
    """What a peer is run with: the same as our engine."""

    vocab_size: int
    """Prompts are drawn from so many token ids."""
    dtype: str
    """bfloat16 or float32."""
    num_threads: int
    max_model_len: int

    @staticmethod
    def of(config: EngineConfig, vocab_size: int, dtype: str, max_model_len: int) -> Conditions:
        """dtype: that of the loaded model, as torch or EngineInfo write it"""
        num_threads = config.num_threads or num_cpus()
        return Conditions(vocab_size, dtype.removeprefix("torch."), num_threads, max_model_len)


def read_peers(
    texts: Sequence[str] | None, path: Path | None, config: EngineConfig
) -> list[PeerSpec]:
    """Those of the options, then those of the file. Raises BenchmarkError for a mistake in one.

    path: a JSON list of objects with `name`, `python`, and optionally `model`, `worker` (default:
    the name) and `options`
    """
    entries = [_split(text) for text in texts or ()] + (_read(path) if path else [])
    peers = [_parse(entry, config) for entry in entries]
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise BenchmarkError(f"peers {', '.join(names)}: a name is given twice")
    return peers


def _split(text: str) -> dict[str, Any]:
    name, found, rest = text.partition("=")
    python, _, model = rest.partition(":")
    if not (name and found and python):
        raise BenchmarkError(f"--peer {text}: must be NAME=PYTHON or NAME=PYTHON:MODEL")
    return {"name": name, "python": python, **({"model": model} if model else {})}


def _read(path: Path) -> list[Any]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--peers-file {path}: not readable as JSON: {error}") from error
    if not isinstance(entries, list):
        raise BenchmarkError(f"--peers-file {path}: must hold a list")
    return entries


def _parse(entry: Any, config: EngineConfig) -> PeerSpec:
    if not isinstance(entry, dict) or not {"name", "python"} <= entry.keys() <= _KEYS:
        raise BenchmarkError(f"peer {entry!r}: needs name and python, may have {sorted(_KEYS)}")
    name, worker = entry["name"], entry.get("worker", entry["name"])
    if worker not in WORKERS:
        raise BenchmarkError(f"peer {name}: its worker must be one of {', '.join(WORKERS)}")
    python = Path(entry["python"])
    if not python.is_file():
        raise BenchmarkError(f"peer {name}: there is no interpreter {python}")
    # no resolve(): the interpreter of a virtual environment is a link, and finds it by its place
    model = Path(entry["model"]) if "model" in entry else resolve_model_path(config.model)
    if not model.is_dir():
        raise BenchmarkError(
            f"peer {name}: it needs a model folder, which {model} is not; "
            "`flowprefill bench export-hf` makes one"
        )
    return PeerSpec(name, python.absolute(), model.absolute(), worker, entry.get("options", {}))
