"""Qwen2, Qwen2.5 (biases on q, k, v) and Qwen3 (RMSNorm on each head of q and k)."""

from __future__ import annotations

from flowprefill.programs import hf_config
from flowprefill.programs.family import Architecture, ConfigKeys, ModelSpec

_SLIDING = "sliding_attention"
_DEFAULT_WINDOW = 4096  # transformers' values where config.json has no such key
_DEFAULT_MAX_WINDOW_LAYERS = 28


def _active_window(keys: ConfigKeys) -> int | None:
    """Attention window in tokens if any layer uses one."""
    if not keys.flag("use_sliding_window"):
        return None
    layer_types = keys.get("layer_types")
    if layer_types is None:
        first = keys.integer("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
        is_active = first < keys.integer("num_hidden_layers")
    elif not isinstance(layer_types, list) or not all(isinstance(t, str) for t in layer_types):
        raise keys.error("layer_types", "must be a list of texts")
    elif set(layer_types) <= {"full_attention", _SLIDING}:
        is_active = _SLIDING in layer_types
    else:
        raise keys.variant("layer_types", f"only full_attention and {_SLIDING} are supported")
    return keys.integer("sliding_window", _DEFAULT_WINDOW) if is_active else None


def _read_qwen2(keys: ConfigKeys) -> ModelSpec:
    return hf_config.read_spec(keys, sliding_window=_active_window(keys), qkv_bias=True)


def _read_qwen3(keys: ConfigKeys) -> ModelSpec:
    keys.integer("head_dim")  # no default: it is not hidden_size / num_attention_heads here
    return hf_config.read_spec(keys, sliding_window=_active_window(keys), qk_norm=True)


HF_ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture(_read_qwen2, hf_config.NAMES_WITH_QKV_BIAS),
    "Qwen3ForCausalLM": Architecture(_read_qwen3, hf_config.NAMES_WITH_QK_NORM),
}
