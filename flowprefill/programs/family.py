"""What all decoder families share: ModelSpec, tensor names, typed look-ups in a model's config.

No torch. A family module (llama.py, qwen.py) turns its config keys into a ModelSpec and names its
tensors; model_spec.py finds the family of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flowprefill.errors import ModelLoadError, UnsupportedVariantError


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched to a longer context."""

    kind: Literal["linear", "llama3"]
    """linear: every frequency divided by `factor`. llama3: low frequencies are divided, high ones
    kept, those between are blended (Llama 3.1)."""
    factor: float
    low_freq_factor: float = 1.0
    """llama3: wavelengths over original_max_position_embeddings / this are divided by `factor`."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths under original_max_position_embeddings / this are kept."""
    original_max_position_embeddings: int = 0
    """llama3: context length in tokens before stretching."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape and constants of a decoder of the Llama kind: RMSNorm, rotary attention, gated MLP."""

    architecture: str
    """As the file names it: `llama` in a GGUF file, `Qwen3ForCausalLM` in a config.json."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Divides num_heads."""
    head_dim: int
    """Even; need not be hidden_size / num_heads."""
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """Longest sequence in tokens. Capped at a sliding window: within it, windowed attention is full
    attention; beyond it the model is not supported."""
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    """RMSNorm over each head of q and k before the rotation."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer; empty if the model names none."""
    bos_token_id: int | None
    sliding_window: int | None = field(default=None, repr=False)
    """Where max_position_embeddings is capped at it: the model itself goes on beyond. Not in the
    repr, which is part of the caches' keys: it changes no weight and no slice."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim={self.head_dim}: rotary embedding needs an even number")
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(f"eos_token_id={token_id}: outside the {self.vocab_size} ids")

    @property
    def q_size(self) -> int:
        """Elements of one token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of one token's keys in one layer, and of its values."""
        return self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, value_bytes: int) -> int:
        """Of one token's keys and values in all layers; value_bytes: of one element."""
        return 2 * self.num_layers * self.kv_size * value_bytes


@dataclass(frozen=True)
class TensorNames:
    """Names of a checkpoint's tensors; `{}` stands for the layer number."""

    embed: str
    norm: str
    lm_head: str
    input_norm: str
    q: str
    k: str
    v: str
    o: str
    post_norm: str
    gate: str
    up: str
    down: str
    qkv_bias: tuple[str, str, str] | None = None
    qk_norm: tuple[str, str] | None = None


@dataclass(frozen=True)
class Architecture:
    """How one architecture is read from one file format."""

    read_spec: Callable[[ConfigKeys], ModelSpec]
    """Config keys -> spec; raises UnsupportedVariantError for variants that the program cannot run,
    ModelLoadError for keys that are broken."""
    names: TensorNames
    interleaved_rope: bool = False
    """Rows of q and k are stored so that rotation pairs are neighbours (GGUF llama), not half a
    head apart (Hugging Face, and our kernels)."""


class ConfigKeys:
    """Typed look-ups in a config.json or GGUF metadata. Errors name file, key and value."""

    def __init__(
        self, values: Mapping[str, Any], where: str, tensor_names: Collection[str] = ()
    ) -> None:
        self.values = values
        self.where = where
        self.tensor_names = tensor_names
        """Tensors of the file, where keys and tensors share one (GGUF)."""

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value; `default` also where the key holds null."""
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number >= minimum."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise self.error(key, f"must be a whole number >= {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number > 0."""
        value = self.get(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value <= 0:
            raise self.error(key, "must be a finite number > 0")
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where the key is absent."""
        value = self.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One id or a list of ids; empty where the key is absent."""
        value = self.get(key, [])
        ids = value if isinstance(value, list) else [value]
        if any(not isinstance(i, int) or isinstance(i, bool) for i in ids):
            raise self.error(key, "must be a token id or a list of them")
        return tuple(ids)

    def token_id(self, key: str) -> int | None:
        """One id, or None where the key is absent."""
        ids = self.token_ids(key)
        if len(ids) > 1:
            raise self.error(key, "must be one token id")
        return ids[0] if ids else None

    def only(self, key: str, supported: object) -> None:
        """Refuse any value of `key` but `supported` (or its absence).

        Raises UnsupportedVariantError, or ModelLoadError for what no model has there.
        """
        value = self.get(key, supported)
        if value == supported:
            return
        kind, name = _kind_of(supported)
        # bool is a kind of int, but no number of anything
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(key, f"must be {name}")
        raise self.variant(key, f"is not supported, only {supported!r} is")

    def error(self, key: str, problem: str) -> ModelLoadError:
        """About a key that is missing or broken."""
        return ModelLoadError(self._describe(key, problem))

    def variant(self, key: str, problem: str) -> UnsupportedVariantError:
        """About a key that says what the native program cannot do."""
        return UnsupportedVariantError(self._describe(key, problem))

    def _describe(self, key: str, problem: str) -> str:
        value = self.values.get(key)
        shown = f"{key} is missing: it" if value is None else f"{key}={repr(value)[:80]}:"
        return f"{self.where}: {shown} {problem}"


def _kind_of(supported: object) -> tuple[type | tuple[type, ...], str]:
    """Types of the values that a key may have beside this one, and in words."""
    if supported is None:
        return dict, "an object"
    if isinstance(supported, bool):
        return bool, "true or false"
    return (str, "a text") if isinstance(supported, str) else ((int, float), "a number")
