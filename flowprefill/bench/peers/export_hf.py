"""`flowprefill bench export-hf`: a GGUF model as a Hugging Face folder, which other engines load.

The weights are the dequantised ones that our own loader gives to our engine.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowprefill.bench.options import ModelJson
from flowprefill.bench.report import BenchmarkError, load_model_json
from flowprefill.programs import hf_config
from flowprefill.programs.model_spec import ModelSpec, read_model_spec, resolve_model_path

if TYPE_CHECKING:
    from torch import Tensor

    from flowprefill.programs.weights import DecoderWeights


def run(
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist, or be empty.")],
    model_json: ModelJson = None,
) -> None:
    """Write the model as config.json, fp32 safetensors and tokenizer files."""
    config = load_model_json(model_json)
    path = resolve_model_path(config.model)
    if path.is_dir():
        raise BenchmarkError(f"{path} is a Hugging Face folder already")
    if out.exists() and any(out.iterdir()):
        raise BenchmarkError(f"{out}: not empty")
    out.mkdir(parents=True, exist_ok=True)
    export(path, out)
    typer.echo(f"written: {out}")


def export(path: Path, out: Path) -> None:
    """Write the model of the .gguf file at `path` into the folder `out`."""
    import torch
    from safetensors.torch import save_file

    from flowprefill.programs.weights import load_weights
    from flowprefill.tokenizer_files import read_tokenizer

    spec = read_model_spec(path)
    tensors = hf_tensors(load_weights(path, spec, torch.float32), spec)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer = read_tokenizer(path)
    tokenizer.backend.save(str(out / "tokenizer.json"))
    ends = {"eos_token_id": list(spec.eos_token_ids), "bos_token_id": spec.bos_token_id}
    files = {
        "config.json": hf_keys(spec),
        "generation_config.json": ends,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": tokenizer.chat_template,
            **tokenizer.named_tokens,
        },
    }
    for name, values in files.items():
        (out / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def hf_keys(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of a llama model: keys of transformers 4, which version 5 reads too."""
    keys: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "eos_token_id": list(spec.eos_token_ids),
    }
    names = ("hidden_size", "head_dim", "intermediate_size", "vocab_size", "rms_norm_eps",
             "max_position_embeddings", "rope_theta", "tie_word_embeddings",
             "bos_token_id")  # fmt: skip
    keys |= {name: getattr(spec, name) for name in names}
    if spec.rope_scaling is not None:  # a GGUF file has linear scaling only
        keys["rope_scaling"] = {"rope_type": "linear", "factor": spec.rope_scaling.factor}
    return keys


def hf_tensors(weights: DecoderWeights, spec: ModelSpec) -> dict[str, Tensor]:
    """Our fused tensors, apart and under their Hugging Face names."""
    names = hf_config.NAMES
    tensors = {names.embed: weights.embed, names.norm: weights.norm}
    if not spec.tie_word_embeddings:
        tensors[names.lm_head] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([spec.q_size, spec.kv_size, spec.kv_size])
        gate, up = layer.gate_up.split(spec.intermediate_size)
        parts = {"q": q, "k": k, "v": v, "gate": gate, "up": up, "o": layer.o_proj}
        parts |= {key: getattr(layer, key) for key in ("input_norm", "post_norm", "down")}
        templates = dataclasses.asdict(names)
        tensors |= {templates[key].format(index): part for key, part in parts.items()}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
