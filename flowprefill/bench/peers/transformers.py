"""transformers, for worker.py: eager PyTorch with scaled_dot_product_attention."""

from __future__ import annotations

import importlib
import time
from typing import Any


class Engine:
    """One model; a key-value cache of its own for each prompt."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._torch = torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        torch.set_num_threads(settings["num_threads"])
        torch.set_grad_enabled(False)
        options = {"attn_implementation": "sdpa", **settings["options"]}
        dtype = getattr(torch, settings["dtype"])
        load = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(settings["model"], dtype=dtype, **options).eval()

    def prefill(self, token_ids: list[int]) -> Any:
        """Returns the first token, [1, 1], and the cache."""
        return self._step(self._torch.tensor([token_ids]), None)

    def decode_s(self, token_ids: list[int], num_tokens: int) -> float:
        token, cache = self.prefill(token_ids)
        start_s = time.perf_counter()
        for _ in range(num_tokens):
            token, cache = self._step(token, cache)
        return time.perf_counter() - start_s

    def _step(self, token_ids: Any, cache: Any) -> Any:
        out = self._model(
            input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1:].argmax(-1), out.past_key_values


def load(settings: dict[str, Any]) -> Engine:
    return Engine(settings)
