"""What a figure of a card must be quoted with: card, driver's CUDA, versions, shapes."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import torch

PACKAGES = ("triton", "transformers", "numpy")


def device_facts(device: torch.device) -> dict[str, Any]:
    """Of the device and of what runs on it; a package that is not there is None."""
    facts: dict[str, Any] = {
        "device": str(device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: _version(name) for name in PACKAGES},
    }
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": card.name,
            "gpu_memory_bytes": card.total_memory,
            "gpu_capability": f"{card.major}.{card.minor}",
            "gpu_processors": card.multi_processor_count,
        }
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
