"""Llama and Mistral: GGUF `llama`, and Hugging Face LlamaForCausalLM and MistralForCausalLM."""

from __future__ import annotations

from flowprefill.programs import hf_config
from flowprefill.programs.family import (
    Architecture,
    ConfigKeys,
    ModelSpec,
    RopeScaling,
    TensorNames,
)

_GGUF_NAMES = TensorNames(
    embed="token_embd.weight",
    norm="output_norm.weight",
    lm_head="output.weight",
    input_norm="blk.{}.attn_norm.weight",
    q="blk.{}.attn_q.weight",
    k="blk.{}.attn_k.weight",
    v="blk.{}.attn_v.weight",
    o="blk.{}.attn_output.weight",
    post_norm="blk.{}.ffn_norm.weight",
    gate="blk.{}.ffn_gate.weight",
    up="blk.{}.ffn_up.weight",
    down="blk.{}.ffn_down.weight",
)
_MISTRAL_DEFAULT_WINDOW = 4096  # what transformers takes where config.json has no such key


def _read_mistral(keys: ConfigKeys) -> ModelSpec:
    has_window = keys.values.get("sliding_window", _MISTRAL_DEFAULT_WINDOW) is not None
    window = keys.integer("sliding_window", _MISTRAL_DEFAULT_WINDOW) if has_window else None
    return hf_config.read_spec(keys, sliding_window=window)


def _read_gguf(keys: ConfigKeys) -> ModelSpec:
    """Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section LLMs."""
    hidden_size = keys.integer("llama.embedding_length")
    num_heads = keys.integer("llama.attention.head_count")
    head_dim = keys.integer("llama.attention.key_length", hidden_size // num_heads)
    keys.only("llama.attention.value_length", head_dim)
    keys.only("llama.rope.dimension_count", head_dim)
    keys.only("llama.expert_count", 0)
    keys.only("llama.rope.scale_linear", 1.0)
    max_positions = keys.integer("llama.context_length")
    window: int | None = keys.integer("llama.attention.sliding_window", 0, minimum=0)
    if not window or window >= max_positions:
        window = None
    # A chat model ends its turn with eot where it has one; eos ends the document.
    eos_ids = [keys.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return ModelSpec(
        architecture="llama",
        num_layers=keys.integer("llama.block_count"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=keys.integer("llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=keys.integer("llama.feed_forward_length"),
        vocab_size=keys.integer("llama.vocab_size", len(keys.get("tokenizer.ggml.tokens", []))),
        max_position_embeddings=window or max_positions,
        rms_norm_eps=keys.number("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("llama.rope.freq_base", 10_000.0),
        rope_scaling=_read_gguf_rope_scaling(keys),
        tie_word_embeddings=_GGUF_NAMES.lm_head not in keys.tensor_names,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=tuple(dict.fromkeys(i for i in eos_ids if i is not None)),
        bos_token_id=keys.token_id("tokenizer.ggml.bos_token_id"),
        sliding_window=window,
    )


def _read_gguf_rope_scaling(keys: ConfigKeys) -> RopeScaling | None:
    kind = keys.get("llama.rope.scaling.type", "none")
    if kind == "linear":
        return RopeScaling("linear", keys.number("llama.rope.scaling.factor"))
    keys.only("llama.rope.scaling.type", "none")
    return None


HF_ARCHITECTURES = {
    "LlamaForCausalLM": Architecture(hf_config.read_spec, hf_config.NAMES),
    "MistralForCausalLM": Architecture(_read_mistral, hf_config.NAMES),
}
GGUF_ARCHITECTURES = {"llama": Architecture(_read_gguf, _GGUF_NAMES, interleaved_rope=True)}
