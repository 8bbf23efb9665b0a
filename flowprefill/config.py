"""EngineConfig: what model.json may say. Nothing else configures the engine.

vLLM's names are accepted where they mean the same. Unknown keys fail the load by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.request import MAX_SLO_S

IGNORED_KEYS = frozenset(
    {"disable_log_requests", "disable_log_stats", "enforce_eager", "max_num_batched_tokens"}
)
"""vLLM keys that have no effect here; a model.json that sets them loads with a log line."""

PolicyName = Literal["fcfs", "sjf", "srpt", "edf", "s-edf"]
POLICIES: tuple[str, ...] = typing.get_args(PolicyName)

_POSITIVE = (
    "max_model_len",
    "max_num_seqs",
    "block_size",
    "kv_cache_memory_bytes",
    "ttft_slo_ms",
    "tbt_slo_ms",
    "max_slice_ms",
    "queue_timeout_ms",
    "num_threads",
)


@dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes one engine; the fields of model.json."""

    model: str
    """A .gguf file, a Hugging Face directory (config.json + safetensors), or `package:NAME` for
    the GGUF file inside an installed Python package."""
    tokenizer: str | None = None
    """Directory or file of the tokenizer; None = beside the model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """auto = bfloat16 where the device multiplies it natively, else float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_model_len: int | None = None
    """Prompt + generated tokens of one request at most; None = the model's own limit."""
    max_num_seqs: int = 16
    """Requests that decode together at most."""
    block_size: int = 16
    """Tokens of one KV block."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache; None = room for four requests of max_model_len on a CPU, or
    gpu_memory_utilization of the card."""
    gpu_memory_utilization: float = 0.9
    """Fraction of a CUDA card's memory for weights and KV cache; in (0, 1]. No effect on cpu."""
    tensor_parallel_size: int = 1
    enable_prefix_caching: bool = False
    seed: int = 0
    """Seeds the draws of requests that bring no seed."""
    policy: PolicyName = "s-edf"
    granularity: str = "tile"
    """Where a prefill may be preempted: whole, chunk:N, layer, op, tile."""
    ttft_slo_ms: float = 1000.0
    """TTFT objective of a request that names none."""
    tbt_slo_ms: float = 200.0
    """TBT objective of a request that names none."""
    max_slice_ms: float = 4.0
    """Longest slice aimed at; bounds the blocking time."""
    max_decode_share: float = 0.5
    """Largest share of the device that decode steps may take from waiting prefills; in (0, 1]."""
    queue_timeout_ms: float = 60_000.0
    """A request that has not started after this time is answered UNAVAILABLE."""
    cancel_poll_ms: float = 100.0
    """How often a live request is asked whether its client has gone; >= 20."""
    num_threads: int | None = None
    """Threads of CPU operators; None = all cores."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            _check_type(f.name, getattr(self, f.name), _TYPES[f.name])
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < 2**63:
                raise ConfigError(f"model.json: {name}={value!r}: must be finite and > 0")
        for name in ("ttft_slo_ms", "tbt_slo_ms"):
            if getattr(self, name) > MAX_SLO_S * 1000:
                limit = f"{MAX_SLO_S * 1000:.0f}"
                raise ConfigError(f"model.json: {name}={getattr(self, name)!r}: must be <= {limit}")
        for name in ("gpu_memory_utilization", "max_decode_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"model.json: {name}={getattr(self, name)!r}: must be in (0, 1]")
        if not 20 <= self.cancel_poll_ms < math.inf:
            raise ConfigError(
                f"model.json: cancel_poll_ms={self.cancel_poll_ms!r}: must be finite and >= 20"
            )
        if not self.model:
            raise ConfigError("model.json: model='': must name a file or directory")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"model.json: tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported"
            )
        Granularity.parse(self.granularity)

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> EngineConfig:
        """Build from the keys of model.json. Raises ConfigError naming the offending key."""
        known = {f.name for f in dataclasses.fields(EngineConfig)}
        unknown = sorted(set(values) - known - IGNORED_KEYS)
        if unknown:
            raise ConfigError(f"model.json: unknown key {unknown[0]!r}; known: {sorted(known)}")
        if "model" not in values:
            raise ConfigError("model.json: key 'model' is missing")
        return EngineConfig(**{k: v for k, v in values.items() if k in known})

    @staticmethod
    def from_file(path: Path) -> tuple[EngineConfig, list[str]]:
        """Read model.json. Returns the config and the keys that have no effect here."""
        if not path.is_file():
            raise ConfigError(f"{path}: model.json with the engine's configuration is missing")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: must hold one JSON object")
        config = EngineConfig.from_dict(values)
        without_effect = set(values) & IGNORED_KEYS
        if config.enable_prefix_caching:  # until KV blocks are reused
            without_effect.add("enable_prefix_caching")
        return config, sorted(without_effect)

    def with_absolute_paths(self, directory: Path) -> EngineConfig:
        """Relative paths start at `directory`, that of model.json; package: names stay."""

        def absolute(path: str) -> str:
            if path.startswith("package:"):
                return path
            return str(directory.absolute() / Path(path).expanduser())

        tokenizer = self.tokenizer and absolute(self.tokenizer)
        return dataclasses.replace(self, model=absolute(self.model), tokenizer=tokenizer)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


_TYPES = typing.get_type_hints(EngineConfig)


def _check_type(name: str, value: object, hint: Any) -> None:
    """Raise ConfigError unless `value` has the field's type; ints pass as floats, bools do not."""
    if typing.get_origin(hint) is Literal:
        if value not in typing.get_args(hint):
            allowed = ", ".join(map(str, typing.get_args(hint)))
            raise ConfigError(f"model.json: {name}={value!r}: must be one of {allowed}")
        return
    allowed_types = typing.get_args(hint) or (hint,)
    if float in allowed_types:
        allowed_types += (int,)
    is_stray_bool = isinstance(value, bool) and bool not in allowed_types
    if is_stray_bool or not isinstance(value, allowed_types):
        shown = hint.__name__ if isinstance(hint, type) else hint
        raise ConfigError(f"model.json: {name}={value!r}: must be of type {shown}")
