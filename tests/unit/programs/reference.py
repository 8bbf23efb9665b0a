"""Hugging Face transformers as the reference: the same model file, fp32, one prompt at a time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ReferenceAnswer:
    """What transformers makes of one prompt."""

    logits: Tensor
    """[vocab] fp32 at the last prompt position."""
    token_ids: list[int]
    """Greedy continuation; goes on past EOS."""
    top2_gaps: list[float]
    """Largest minus second largest logit before each of token_ids: where it is tiny, another
    implementation may rightly choose the other token."""


def transformers_logits(path: Path, token_ids: list[int], num_tokens: int = 64) -> ReferenceAnswer:
    """Run a prompt through transformers. path: a GGUF file or a Hugging Face directory."""
    model = reference_model(path)
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=num_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    logits = torch.cat(output.logits)  # [num_tokens, vocab]
    top2 = logits.topk(2).values
    return ReferenceAnswer(
        logits=logits[0],
        token_ids=output.sequences[0, len(token_ids) :].tolist(),
        top2_gaps=(top2[:, 0] - top2[:, 1]).tolist(),
    )


@functools.lru_cache(maxsize=1)
def reference_model(path: Path) -> Any:
    """The transformers model of `path`, fp32, in eval mode. The last one is kept."""
    import transformers

    if path.is_dir():
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    else:
        model = _gguf_model(path)
    model.generation_config.eos_token_id = None  # answers go on past it
    return model.eval()


gguf_reader = functools.lru_cache(maxsize=1)(gguf.GGUFReader)
"""The gguf package's own reader; it needs seconds for a file with a vocabulary."""


def _gguf_model(path: Path) -> Any:
    """What from_pretrained(gguf_file=...) does, without the accelerate package it insists on."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with pytest.MonkeyPatch.context() as patch, no_init_weights():
        # transformers reads the header twice and rebuilds the name map for each submodule: 10 s.
        patch.setattr(gguf, "GGUFReader", gguf_reader)
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        config = AutoConfig.for_model(**load_gguf_checkpoint(path)["config"])
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    result = model.load_state_dict(tensors, strict=False)
    model.tie_weights()  # skipped together with the initial values
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(result.missing_keys) <= tied and not result.unexpected_keys, result
    return model
