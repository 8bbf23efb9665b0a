"""FlowPrefill: LLM serving with preemptible prefill and TTFT objectives.

The public names load on first use, so that clients and the Triton stub never import torch.
"""

from __future__ import annotations

import importlib
from typing import Any

from flowprefill.version import __version__

_HOME = {
    "EngineConfig": "flowprefill.config",
    "SLO": "flowprefill.request",
    "Request": "flowprefill.request",
    "TokenOutput": "flowprefill.request",
    "FinishReason": "flowprefill.request",
    "SamplingParams": "flowprefill.sampling_params",
    "preemptible": "flowprefill.hooks.preemptible",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
