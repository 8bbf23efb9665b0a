"""From the `model` key of model.json to a path, and from the path to a ModelSpec. No torch.

A new family is one module with HF_ARCHITECTURES (and GGUF_ARCHITECTURES), added to the tables here.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from flowprefill.errors import ConfigError, ModelLoadError, UnsupportedArchitectureError
from flowprefill.gguf_file import GgufFile
from flowprefill.programs import llama, qwen
from flowprefill.programs.family import Architecture, ConfigKeys, ModelSpec, RopeScaling

__all__ = [
    "ModelSpec",
    "RopeScaling",
    "check_max_model_len",
    "find_architecture",
    "generation_eos",
    "read_json_object",
    "read_model_spec",
    "resolve_model_path",
]

_GGUF_ARCHITECTURES: dict[str, Architecture] = {**llama.GGUF_ARCHITECTURES}
_HF_ARCHITECTURES: dict[str, Architecture] = {**llama.HF_ARCHITECTURES, **qwen.HF_ARCHITECTURES}
_PACKAGE_PREFIX = "package:"


def resolve_model_path(model: str) -> Path:
    """Find a model on this machine: a .gguf file, or a directory with config.json.

    model: such a path, or `package:NAME` for the one .gguf file inside an installed Python package
    (which is found without importing it).
    Raises ModelLoadError; nothing is ever downloaded.
    """
    if model.startswith(_PACKAGE_PREFIX):
        return _find_in_package(model.removeprefix(_PACKAGE_PREFIX))
    path = Path(model).expanduser()
    if (path.is_file() and path.suffix == ".gguf") or (path / "config.json").is_file():
        return path
    problem = (
        "neither a .gguf file nor a directory with config.json" if path.exists() else "not found"
    )
    raise ModelLoadError(
        f"model={model!r}: {problem}. Models are not downloaded: give a .gguf file, a Hugging Face "
        f"directory on this machine, or package:NAME"
    )


def read_model_spec(path: Path) -> ModelSpec:
    """Read the shape and constants of the model at `path` (see resolve_model_path).

    Raises UnsupportedArchitectureError, UnsupportedVariantError naming the key that asks for what
    the architecture's program cannot do, or ModelLoadError naming the key that is missing or wrong.
    """
    if path.is_dir():
        return _read_hf_spec(path)
    file = GgufFile(path)
    keys = ConfigKeys(file.metadata, str(path), file.tensors)
    return find_architecture(path, keys.get("general.architecture")).read_spec(keys)


def find_architecture(path: Path, name: object) -> Architecture:
    """The known architecture called `name` in the format of `path`, a GGUF file or a directory."""
    known = _HF_ARCHITECTURES if path.is_dir() else _GGUF_ARCHITECTURES
    if not isinstance(name, str) or name not in known:
        raise UnsupportedArchitectureError(
            f"{path}: architecture {name!r} is not supported; known: {', '.join(sorted(known))}"
        )
    return known[name]


def _read_hf_spec(directory: Path) -> ModelSpec:
    config = read_json_object(directory / "config.json")
    eos = generation_eos(directory)
    if eos is not None:
        config["eos_token_id"] = eos
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    keys = ConfigKeys(config, str(directory / "config.json"))
    return find_architecture(directory, name).read_spec(keys)


def generation_eos(directory: Path) -> Any:
    """eos_token_id of generation_config.json, which overrides config.json as in transformers; None
    = it says nothing. Raises ModelLoadError if it is not readable."""
    path = directory / "generation_config.json"
    return read_json_object(path).get("eos_token_id") if path.is_file() else None


def check_max_model_len(max_model_len: int | None, limit: int | None) -> None:
    """Raises ConfigError. limit: the model's own; None = it knows none."""
    if limit and max_model_len is not None and max_model_len > limit:
        raise ConfigError(
            f"model.json: max_model_len={max_model_len}: the model's limit is {limit}"
        )
    if max_model_len == 1:
        raise ConfigError("model.json: max_model_len=1: must hold a prompt and its answer; >= 2")


def read_json_object(path: Path) -> dict[str, Any]:
    """One JSON object. Raises ModelLoadError."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path}: must hold one JSON object")
    return values


def _find_in_package(name: str) -> Path:
    # A dotted name would import its parents; PyPI spells names with dashes.
    module = name.replace("-", "_")
    spec = importlib.util.find_spec(module) if module.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(f"model='package:{name}': no such Python package is installed")
    roots = [Path(location) for location in spec.submodule_search_locations]
    files = sorted(file for root in roots for file in root.rglob("*.gguf"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files) or "none"
        raise ModelLoadError(
            f"model='package:{name}': must hold exactly one .gguf file; found: {found}"
        )
    return files[0]
