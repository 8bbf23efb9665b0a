"""What the folder of a transformers model says of it before its weights are read: whether it can be
hooked, and its HookedSpec."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowprefill.errors import ModelLoadError, UnsupportedArchitectureError
from flowprefill.programs.family import ConfigKeys
from flowprefill.programs.model_spec import (
    check_max_model_len,
    generation_eos,
    read_json_object,
)

_OLDEST_TRANSFORMERS = (4, 57)
"""Whose cache objects and arguments are known."""
_DEFAULT_MAX_LEN = 8192
"""Of a model that knows no limit, as recurrent ones do."""
_STRETCHED = ("yarn", "dynamic")
"""Rotary scalings for contexts beyond the max_position_embeddings that config.json may keep."""


@dataclass(frozen=True)
class HookedSpec:
    """What the engine must know of a model."""

    architecture: str
    max_position_embeddings: int
    """The engine's max_model_len."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(f"eos_token_id={token_id}: outside the {self.vocab_size} ids")


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
    if keys.get("is_encoder_decoder") or "EncoderDecoder" in name:
        raise UnsupportedArchitectureError(f"{path}: {name} is an encoder-decoder")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(keys.get("model_type")))
    if known is not None and name in (known if isinstance(known, (list, tuple)) else [known]):
        return name  # what comes with code of its own too is run by transformers'
    if "auto_map" in keys:
        raise UnsupportedArchitectureError(
            f"{path}: {name} comes with code of its own (auto_map in config.json), which is not run"
        )
    raise UnsupportedArchitectureError(
        f"{path}: {name} (model_type {keys.get('model_type')!r}) is no causal LM of the installed "
        "transformers"
    )


def check_packages(path: Path) -> None:
    """Raises UnsupportedArchitectureError where a hooked model would lack a package, or have one
    that is too old."""
    for name in ("transformers", "greenlet"):
        if importlib.util.find_spec(name) is None:
            raise UnsupportedArchitectureError(
                f"{path}: a transformers model needs the package {name}: pip install "
                "'flowprefill[hooks]'"
            )
    version = importlib.metadata.version("transformers")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < _OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
        raise UnsupportedArchitectureError(
            f"{path}: a transformers model needs transformers >= {oldest}; {version} is installed"
        )


def read_spec(path: Path, architecture: str, max_model_len: int | None) -> HookedSpec:
    """What the folder says of the model. Raises ConfigError or ModelLoadError."""
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        text = text_config(config)
    except Exception as error:  # of many kinds, all of them config.json's
        raise ModelLoadError(f"{path}: transformers cannot read config.json: {error}") from error
    limit = length_limit(text)
    check_max_model_len(max_model_len, limit)
    eos = [generation_eos(path), *(getattr(c, "eos_token_id", None) for c in (config, text))]
    values = {
        "vocab_size": getattr(text, "vocab_size", None),
        "eos_token_id": next((ids for ids in eos if ids is not None), None),
    }
    keys = ConfigKeys(values, str(path / "config.json"))
    return HookedSpec(
        architecture,
        max_model_len or limit or _DEFAULT_MAX_LEN,
        keys.integer("vocab_size"),
        keys.token_ids("eos_token_id"),
    )


def text_config(config: Any) -> Any:
    """The part of a model's configuration that is about text; others may be about images."""
    return config.get_text_config(decoder=True)


def length_limit(text: Any) -> int | None:
    """Tokens of the longest sequence by a text_config; None = the model knows no limit."""
    limit = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    return max(limit, *(_stretched(rope, limit) for rope in rope_scalings(text)))


def rope_scalings(text: Any) -> list[Mapping[str, Any]]:
    """Of a text_config: one for all layers, or one for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return [value for value in rope.values() if isinstance(value, dict)] or [rope]


def rope_type(rope: Mapping[str, Any]) -> str:
    """Of one of rope_scalings, under the key of transformers 5 or an older one."""
    return str(rope.get("rope_type") or rope.get("type") or "default")


def _stretched(rope: Mapping[str, Any], limit: int) -> int:
    """The limit as a rotary scaling extends it."""
    factor = rope.get("factor")
    if rope_type(rope) not in _STRETCHED or not isinstance(factor, (int, float)):
        return limit
    return int(factor * (rope.get("original_max_position_embeddings") or limit))
