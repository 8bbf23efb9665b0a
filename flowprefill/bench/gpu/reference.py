"""The same weights in transformers, with torch's scaled_dot_product_attention, to compare with.

On a card its parameters are views of our own fused tensors, so there is no second copy of the
model. Needs transformers.
"""

from __future__ import annotations

import copy
import importlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flowprefill.bench.gpu.shapes import Shapes
from flowprefill.bench.report import BenchmarkError
from flowprefill.loading import LoadedModel
from flowprefill.programs.hf_config import NAMES, NAMES_WITH_QK_NORM, NAMES_WITH_QKV_BIAS
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.weights import DecoderWeights

NAME = "transformers, sdpa"


class Reference:
    """One model of transformers on the device of ours."""

    def __init__(self, shapes: Shapes, model: LoadedModel, weights: DecoderWeights) -> None:
        """Raises BenchmarkError if transformers is not there or has no such model."""
        try:
            transformers = importlib.import_module("transformers")
        except ImportError as error:
            raise BenchmarkError(f"transformers is not there: {error}") from error
        self._device = model.device.torch_device
        self.version = f"transformers {transformers.__version__}"
        # a copy: transformers writes into what it is given
        keys = copy.deepcopy({k: v for k, v in shapes.items() if k != "model_type"})
        config = transformers.AutoConfig.for_model(shapes["model_type"], **keys)
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(
                config, attn_implementation="sdpa", dtype=model.dtype
            )
        state = dict(named_parameters(model.spec, weights, model.dtype))
        made.load_state_dict(state, strict=True, assign=True)
        if model.spec.tie_word_embeddings:
            made.tie_weights()
        # what is no parameter was made on the meta device, and holds nothing
        with self._device:
            made.model.rotary_emb = type(made.model.rotary_emb)(config=config)
        self._model = made.eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[vocab] of the last token; the KV cache is filled as for a decode."""
        tokens = torch.tensor([list(token_ids)], device=self._device)
        out: Any = self._model(input_ids=tokens, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1]
        return logits

    def prefill_s(self, token_ids: Sequence[int]) -> float:
        """Time from the prompt to its first token, seconds."""
        start_s = time.perf_counter()
        int(self.logits(token_ids).argmax())
        return time.perf_counter() - start_s


def named_parameters(
    spec: ModelSpec, weights: DecoderWeights, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Our tensors by the names of a Hugging Face checkpoint; matrices are views of the fused ones.

    dtype: that norms are rounded to, which are fp32 here
    """
    yield NAMES.embed, weights.embed
    yield NAMES.norm, weights.norm.to(dtype)
    yield NAMES.lm_head, weights.lm_head
    for index, layer in enumerate(weights.layers):
        q, k, v = layer.qkv.split([spec.q_size, spec.kv_size, spec.kv_size])
        gate, up = layer.gate_up.chunk(2)
        named = {
            NAMES.input_norm: layer.input_norm.to(dtype),
            NAMES.q: q,
            NAMES.k: k,
            NAMES.v: v,
            NAMES.o: layer.o_proj,
            NAMES.post_norm: layer.post_norm.to(dtype),
            NAMES.gate: gate,
            NAMES.up: up,
            NAMES.down: layer.down,
        }
        if layer.qkv_bias is not None and NAMES_WITH_QKV_BIAS.qkv_bias:
            biases = layer.qkv_bias.split([spec.q_size, spec.kv_size, spec.kv_size])
            named |= dict(zip(NAMES_WITH_QKV_BIAS.qkv_bias, biases, strict=True))
        if layer.q_norm is not None and layer.k_norm is not None and NAMES_WITH_QK_NORM.qk_norm:
            norms = layer.q_norm.to(dtype), layer.k_norm.to(dtype)
            named |= dict(zip(NAMES_WITH_QK_NORM.qk_norm, norms, strict=True))
        for name, tensor in named.items():
            yield name.format(index), tensor
