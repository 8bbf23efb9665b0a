"""Tiny transformers models of random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.hooks.causal_lm import CausalLM
from flowprefill.hooks.program import HookedProgram
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import ProgramState, SequenceInput

VOCAB = 97
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_MIXTURE = {"num_experts_per_tok": 2}
_GEMMA = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": _ATTENTION,
    "Mistral": {**_ATTENTION, "sliding_window": 16},
    "Qwen2": _ATTENTION,
    "Qwen3": {**_ATTENTION, "head_dim": 8},
    "Gemma3": {**_ATTENTION, "head_dim": 8, "sliding_window": 16, "layer_types": _GEMMA},
    "Mixtral": {**_ATTENTION, **_MIXTURE, "num_local_experts": 4},
    "Qwen3Moe": {**_ATTENTION, **_MIXTURE, "head_dim": 8, "num_experts": 4,
                 "moe_intermediate_size": 24, "decoder_sparse_step": 1},
    "Phi3": _ATTENTION,
    "GPTNeoX": {"num_attention_heads": 4, "intermediate_size": 48},
    "Mamba": {"state_size": 8},
    "MiniMax": {**_ATTENTION, **_MIXTURE, "head_dim": 8, "num_local_experts": 4, "block_size": 16,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}  # fmt: skip
ARCHITECTURES = tuple(CONFIGS)


def make_model(architecture: str, **more: Any) -> nn.Module:
    """A model of one of ARCHITECTURES, the same each time."""
    import transformers

    suffix = "TextConfig" if architecture == "Gemma3" else "Config"
    keys = {**SIZES, **CONFIGS[architecture], **more}
    config = getattr(transformers, architecture + suffix)(**keys)
    if architecture == "Mamba":
        del config.max_position_embeddings
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in model.named_parameters():  # larger than at the start of a training
        if parameter.dim() > 1 or name.endswith("proj.bias"):
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def make_program(architecture: str, **more: Any) -> HookedProgram:
    return HookedProgram(CausalLM(make_model(architecture, **more)), tile_rows=32)


def table(index: int = 0, num_blocks: int = 16) -> BlockTable:
    """Blocks of 16 tokens of sequence `index`."""
    return BlockTable(range(index * num_blocks, (index + 1) * num_blocks), 16, CPU)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
    return tokens


def run_to_end(state: ProgramState) -> Tensor:
    while not state.is_done:
        state.run_slice()
    return state.logits


def prompt_input(tokens: list[int], at: BlockTable) -> SequenceInput:
    return SequenceInput(tokens, 0, at)
