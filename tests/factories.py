"""Things that tests build: tiny complete models, requests. Heavy libraries are imported inside."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from flowprefill.request import SLO, Request
from flowprefill.sampling_params import SamplingParams

TINY_MERGES = [
    tuple(pair.split())
    for pair in ("Ġ t", "h e", "i n", "Ġt he", "e r", "o n", "Ġ a", "r e", "a n", "o r", "in g",
                 "Ġa n", "l l", "e s")
]  # fmt: skip
BOS, EOS = "<|bos|>", "<|eos|>"
TINY_VOCAB_SIZE = 256 + len(TINY_MERGES) + 2
"""Bytes, merges, then BOS and EOS as the last two ids of the tokenizer."""
TINY_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


def make_request(
    prompt_len: int = 512,
    ttft_slo_s: float = 0.5,
    *,
    req_id: int = 0,
    arrival_s: float = 0.0,
    tbt_slo_s: float = 0.2,
    vocab_size: int = 256,
    seed: int | None = None,
    **sampling: Any,
) -> Request:
    """A greedy request with a random prompt, drawn from `seed` (default: req_id)."""
    draw = random.Random(req_id if seed is None else seed)
    return Request(
        req_id=req_id,
        prompt_token_ids=[draw.randrange(vocab_size) for _ in range(prompt_len)],
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),
        slo=SLO(ttft_slo_s, tbt_slo_s),
        arrival_s=arrival_s,
    )


def write_tiny_model(
    directory: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    vocab_size: int = TINY_VOCAB_SIZE,
    num_layers: int = 3,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int = 96,
    max_len: int = 512,
    tied: bool = False,
    dtype: str = "float32",
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Write a complete Hugging Face model of random weights, and its tokenizer, into `directory`.

    architecture: one of ARCHITECTURES. config: further keys of the transformers config, for example
    rope_parameters or sliding_window. Norms and biases are random too: leaving one out shows.
    Returns `directory`.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model_class, config_class = _transformers_classes(architecture)
    sizes = {
        "vocab_size": vocab_size,
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "max_position_embeddings": max_len,
        "tie_word_embeddings": tied,
        "bos_token_id": TINY_VOCAB_SIZE - 2,
        "eos_token_id": TINY_VOCAB_SIZE - 1,
    }
    if architecture == "mistral":
        sizes["sliding_window"] = None
    model = model_class(config_class(**{**sizes, **config}))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            # Scaled so that activations keep their size and logits differ clearly.
            scale = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            is_norm = name.endswith("norm.weight")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else scale * noise)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    write_tiny_tokenizer(directory)
    return directory


def write_tiny_tokenizer(directory: Path) -> None:
    """Write tokenizer.json (byte-level BPE of TINY_VOCAB_SIZE ids) and tokenizer_config.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in TINY_MERGES]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, list(TINY_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BOS, EOS)])
    assert tokenizer.get_vocab_size() == TINY_VOCAB_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "chat_template": TINY_CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def write_tiny_gguf(path: Path, hf_directory: Path, quant: str = "F32", **metadata: Any) -> Path:
    """Write a tiny llama model (see write_tiny_model) as GGUF, laid out as llama.cpp does it.

    quant: gguf type of the matrices. metadata: keys set after the usual ones, `__` for `.`; None
    drops the key. The file carries no tokenizer but the special ids. Returns `path`.
    """
    import gguf
    from gguf.quants import quantize
    from safetensors.numpy import load_file

    config = json.loads((hf_directory / "config.json").read_text(encoding="utf-8"))
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    keys: dict[str, Any] = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": num_heads,
        "llama.attention.head_count_kv": num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        **{key.replace("__", "."): value for key, value in metadata.items()},
    }
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture", "llama"))
    add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in keys.items():
        if value is not None:
            add[type(value)](key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for hf_name, values in load_file(hf_directory / "model.safetensors").items():
        for part, heads in (("q_proj", num_heads), ("k_proj", num_kv_heads)):
            if part in hf_name:  # halves of a head -> neighbouring rows
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        kind = gguf.GGMLQuantizationType[quant if values.ndim > 1 else "F32"]
        name = names.get_name(hf_name, try_suffixes=(".weight",))
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _transformers_classes(architecture: str) -> tuple[Any, Any]:
    import transformers

    prefix = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    name = prefix[architecture]
    return getattr(transformers, name + "ForCausalLM"), getattr(transformers, name + "Config")
