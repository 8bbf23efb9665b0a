"""Keys of a Hugging Face config.json, and tensor names, that the supported families have in common.

Accepts the keys of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
"""

from __future__ import annotations

import dataclasses

from flowprefill.programs.family import ConfigKeys, ModelSpec, RopeScaling, TensorNames

_LAYER = "model.layers.{}."

NAMES = TensorNames(
    embed="model.embed_tokens.weight",
    norm="model.norm.weight",
    lm_head="lm_head.weight",
    input_norm=_LAYER + "input_layernorm.weight",
    q=_LAYER + "self_attn.q_proj.weight",
    k=_LAYER + "self_attn.k_proj.weight",
    v=_LAYER + "self_attn.v_proj.weight",
    o=_LAYER + "self_attn.o_proj.weight",
    post_norm=_LAYER + "post_attention_layernorm.weight",
    gate=_LAYER + "mlp.gate_proj.weight",
    up=_LAYER + "mlp.up_proj.weight",
    down=_LAYER + "mlp.down_proj.weight",
)
NAMES_WITH_QKV_BIAS = dataclasses.replace(
    NAMES,
    qkv_bias=(
        _LAYER + "self_attn.q_proj.bias",
        _LAYER + "self_attn.k_proj.bias",
        _LAYER + "self_attn.v_proj.bias",
    ),
)
NAMES_WITH_QK_NORM = dataclasses.replace(
    NAMES, qk_norm=(_LAYER + "self_attn.q_norm.weight", _LAYER + "self_attn.k_norm.weight")
)


def read_spec(
    keys: ConfigKeys,
    *,
    sliding_window: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelSpec:
    """Build the spec from the shared keys.

    sliding_window: attention window in tokens where the model has an active one.
    Raises ModelLoadError for a missing key or a wrong value, UnsupportedVariantError.
    """
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False)
    keys.only("hidden_act", "silu")
    keys.only("partial_rotary_factor", 1.0)
    keys.only("quantization_config", None)
    num_heads, hidden_size = keys.integer("num_attention_heads"), keys.integer("hidden_size")
    max_positions = keys.integer("max_position_embeddings")
    rope_theta, rope_scaling = _read_rope(keys, max_positions)
    if sliding_window is not None and sliding_window >= max_positions:
        sliding_window = None  # no sequence is longer
    return ModelSpec(
        architecture=keys.get("architectures")[0],
        num_layers=keys.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.integer("num_key_value_heads", num_heads),
        head_dim=keys.integer("head_dim", hidden_size // num_heads),
        intermediate_size=keys.integer("intermediate_size"),
        vocab_size=keys.integer("vocab_size"),
        max_position_embeddings=sliding_window or max_positions,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        eos_token_ids=keys.token_ids("eos_token_id"),
        bos_token_id=keys.token_id("bos_token_id"),
        sliding_window=sliding_window,
    )


def _read_rope(keys: ConfigKeys, max_positions: int) -> tuple[float, RopeScaling | None]:
    block = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    values = keys.get(block, {})
    if not isinstance(values, dict):
        raise keys.error(block, "must be an object")
    if any(isinstance(value, dict) for value in values.values()):
        raise keys.variant(block, "is not supported where kinds of layers have their own")
    rope = ConfigKeys(values, f"{keys.where}: {block}")
    rope.only("partial_rotary_factor", 1.0)
    theta = rope.number("rope_theta", keys.number("rope_theta", 10_000.0))
    kind_key = "rope_type" if "rope_type" in values else "type"
    kind = rope.get(kind_key, "default")
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, RopeScaling("linear", rope.number("factor"))
    if kind == "llama3":
        return theta, RopeScaling(
            "llama3",
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer(
                "original_max_position_embeddings", max_positions
            ),
        )
    if not isinstance(kind, str):
        raise rope.error(kind_key, "must be a text")
    raise rope.variant(kind_key, "is not supported, only default, linear and llama3 are")
