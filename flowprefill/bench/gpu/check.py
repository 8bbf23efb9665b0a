"""`flowprefill bench gpu-check`: whether kernels, passes and engine are right on this CUDA card.

Without a card a dry run: the same checks in triton's interpreter and on the CPU, on tiny shapes, in
fp32, which say nothing of a card.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flowprefill.bench.gpu import checks
from flowprefill.bench.gpu.report import DRY_RUN
from flowprefill.bench.gpu.shapes import SMALL, SMALL_DRY
from flowprefill.bench.options import JsonOut
from flowprefill.bench.progress import bench_progress
from flowprefill.bench.report import print_json

if TYPE_CHECKING:
    import torch

    from flowprefill.bench.gpu.checks import Check, Finding

INTERPRET = "TRITON_INTERPRET"
_SEED = 0


def run(json_out: JsonOut = None) -> None:
    """Check kernels, parking, hidden synchronises, decode and prefix reuse on a CUDA card; without
    one a dry run. Exit code 1: a check failed."""
    import torch
    from rich.console import Console

    from flowprefill.bench.gpu.facts import device_facts

    is_dry_run = not torch.cuda.is_available()
    console = Console(width=150)
    if is_dry_run:
        console.rule(DRY_RUN)
        os.environ.setdefault(INTERPRET, "1")  # read when triton is imported
    device = torch.device("cpu" if is_dry_run else "cuda")
    findings = find(device)
    where = "DRY RUN on a CPU" if is_dry_run else torch.cuda.get_device_name(device)
    console.print(checks.make_table(findings, f"Checks: {where}"))
    if is_dry_run:
        console.rule(DRY_RUN)
    result = checks.to_json(findings)
    figures = {"dry_run": result} if is_dry_run else result
    print_json({"is_dry_run": is_dry_run, **figures, "run": device_facts(device)}, json_out)
    if result["num_failed"]:
        raise typer.Exit(1)


def find(device: torch.device) -> list[Finding]:
    """All checks, with a bar on standard error."""
    from flowprefill.bench.gpu.kernel_checks import kernel_checks

    with bench_progress(None) as progress, contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flowprefill-")))
        findings = checks.run_checks(kernel_checks(device), progress.describe)
        for make in (_program_checks, _engine_checks):
            # a model that does not load is a failed check too
            found: list[Check] = []

            def load(make: Any = make, found: list[Check] = found) -> str:
                found += make(device, folder)
                return ""

            loading = checks.Check(f"loading for {make.__name__.strip('_')}", load)
            findings += checks.run_checks([loading], progress.describe)
            findings += checks.run_checks(found, progress.describe)
        return findings


def _program_checks(device: torch.device, folder: Path) -> list[Check]:
    """On the Triton kernels: of a card, or interpreted."""
    from flowprefill.bench.gpu.program_checks import program_checks
    from flowprefill.bench.gpu.random_model import load_random_model
    from flowprefill.errors import ConfigError

    is_card = device.type == "cuda"
    shapes, lengths = (SMALL, (700, 330, 501)) if is_card else (SMALL_DRY, (34, 3))
    settings = _settings(device) | {"kernels": "triton"}
    try:
        _, model, _ = load_random_model(shapes, settings, folder, _SEED, _quiet)
    except ConfigError as error:
        if is_card:
            raise
        raise checks.NotChecked(str(error)) from error
    return program_checks(model, lengths)


def _engine_checks(device: torch.device, folder: Path) -> list[Check]:
    """On the kernels that a server would take; interpreted ones would take minutes to profile."""
    from flowprefill.bench.gpu.program_checks import engine_checks
    from flowprefill.bench.gpu.random_model import profiled_random_model

    is_card = device.type == "cuda"
    shapes = SMALL if is_card else SMALL_DRY
    settings = _settings(device) | {"kernels": "auto" if is_card else "torch"}
    random_model = profiled_random_model(shapes, settings, folder, _SEED, _quiet)
    return engine_checks(random_model, 4000 if is_card else 500)


def _settings(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        return {"device": "cuda", "dtype": "bfloat16", "kv_cache_memory_bytes": 2**28}
    return {
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "kv_cache_memory_bytes": 2**21,
        "max_model_len": SMALL_DRY["max_position_embeddings"],
    }


def _quiet(stage: str, fraction: float) -> None:
    pass
