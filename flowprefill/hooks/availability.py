"""Whether the transformers model in a folder can be hooked, before anything of it is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from flowprefill.errors import UnsupportedArchitectureError
from flowprefill.programs.model_spec import read_json_object


def check_available(path: Path) -> str:
    """The architecture of a folder, if transformers itself has a causal LM of that name.

    Raises UnsupportedArchitectureError, which names it, or ModelLoadError.
    """
    if not path.is_dir():
        raise UnsupportedArchitectureError(
            f"{path}: program='hooks' needs a Hugging Face folder, not a GGUF file; `flowprefill "
            "bench export-hf` makes one of it"
        )
    check_packages(path)
    keys = read_json_object(path / "config.json")
    names = keys.get("architectures")
    name = str(names[0] if isinstance(names, list) and names else names)
    if "auto_map" in keys:
        raise UnsupportedArchitectureError(
            f"{path}: {name} comes with code of its own (auto_map in config.json), which is not run"
        )
    if keys.get("is_encoder_decoder") or "EncoderDecoder" in name:
        raise UnsupportedArchitectureError(f"{path}: {name} is an encoder-decoder")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(keys.get("model_type")))
    if known is None or name not in (known if isinstance(known, (list, tuple)) else [known]):
        raise UnsupportedArchitectureError(
            f"{path}: {name} (model_type {keys.get('model_type')!r}) is no causal LM of the "
            "installed transformers"
        )
    return name


def check_packages(path: Path) -> None:
    """Raises UnsupportedArchitectureError where a hooked model would lack a package."""
    for name in ("transformers", "greenlet"):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedArchitectureError(
                f"{path}: a transformers model needs the package {name}: pip install "
                "'flowprefill[hooks]'"
            )
