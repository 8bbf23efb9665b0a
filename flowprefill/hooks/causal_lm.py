"""CausalLM: the calls that passes make of a transformers model, and what its cache object allows.

Knows no requests. Argument names differ between versions of transformers and are found once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.errors import ModelLoadError, UnsupportedArchitectureError
from flowprefill.hooks.boundaries import find_boundaries
from flowprefill.hooks.suspend import Forward, hook
from flowprefill.kv.host_copies import to_device

_CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_CONTINUED = frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"})
"""Classes of cache layers to which several tokens may be added behind others. Recurrent ones take
one token at a time: transformers 5.24 gives other logits when a Mamba prompt comes in parts."""
_BATCHED = frozenset({"DynamicLayer"})
"""Classes of cache layers whose sequences can be padded into one batch."""
_MOVING_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest sequence of a pass: a prompt in parts, or
beside others, would be rotated otherwise than alone."""
_FIRST_TOKENS, _MORE_TOKENS = 8, 24


class CausalLM:
    """One transformers model with boundaries. Its hooks stay for its life."""

    def __init__(self, model: nn.Module, class_names: Sequence[str] = ()) -> None:
        """class_names: of the boundary modules, as in find_boundaries. Raises ConfigError, and
        UnsupportedArchitectureError if the model returns no cache."""
        self.model = model
        self.boundaries = find_boundaries(model, class_names)
        hook(self.boundaries.modules)
        self._device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((n for n in _CACHE_NAMES if n in parameters), _CACHE_NAMES[1])
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        is_moving = _has_moving_rope(model)
        self._moving = _dynamic_embeddings(model) if is_moving else []
        self._probe(is_moving)

    def arguments(self, token_ids: Sequence[int], cache: Any) -> dict[str, Any]:
        """Of a call of the model: tokens behind those in `cache`; None = the first ones."""
        arguments = {"input_ids": to_device([token_ids], self._device)}
        if cache is not None:
            arguments[self._cache_name] = cache
        return {**arguments, "use_cache": True, **self._last_only}

    def start(self, token_ids: Sequence[int], cache: Any) -> Forward:
        """A pass of these arguments."""
        return self._forward(self.arguments(token_ids, cache))

    def start_batch(self, token_ids: Sequence[int], caches: Sequence[Any]) -> Forward:
        """A pass over one token each of several sequences, if is_batched; it fills their caches."""
        from flowprefill.hooks.batch_cache import joined  # which needs transformers

        counts = [num_tokens(cache) for cache in caches]
        longest = max(counts) + 1
        lengths = to_device(counts, self._device)[:, None]
        # each sequence ends at the right edge of the batch
        mask = torch.arange(longest, device=self._device) >= longest - 1 - lengths
        arguments = {
            "input_ids": to_device(token_ids, self._device)[:, None],
            "attention_mask": mask.long(),
            "position_ids": lengths,
            self._cache_name: joined(caches),
        }
        return self._forward({**arguments, "use_cache": True, **self._last_only})

    def _forward(self, arguments: Mapping[str, Any]) -> Forward:
        """A pass, which runs before the next one is made."""
        for module in self._moving:  # back to where no earlier pass had grown it
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len
        return Forward(partial(self.model, **arguments))

    def cache_of(self, forward: Forward) -> Any:
        """The cache that a pass has filled."""
        return self._get(forward.result)

    @staticmethod
    def logits_of(forward: Forward) -> Tensor:
        """[sequences, vocab] fp32 of the last token of each."""
        logits: Tensor = forward.result.logits
        return logits[:, -1].float()

    def _probe(self, is_moving: bool) -> None:
        """Run some tokens: what the cache is, how large, and how many boundaries a pass has."""
        first = self._run_alone(_FIRST_TOKENS)
        self.num_slices = first.num_boundaries + 1
        cache = self._get(first.result)
        layers = None if cache is None else getattr(cache, "layers", None)
        if not layers:
            raise UnsupportedArchitectureError(
                f"{type(self.model).__name__}: the model returns no cache of its layers, which "
                "decoding needs"
            )
        kinds = {type(layer).__name__ for layer in layers}
        self.cache_kinds = ", ".join(sorted(kinds))
        self.is_continued = kinds <= _CONTINUED and not is_moving
        self.is_batched = kinds <= _BATCHED and not is_moving
        longer = self._run_alone(_MORE_TOKENS)
        sizes = cache_bytes(cache), cache_bytes(self._get(longer.result))
        self.token_bytes = max(0, sizes[1] - sizes[0]) // (_MORE_TOKENS - _FIRST_TOKENS)
        self.sequence_bytes = max(0, sizes[0] - self.token_bytes * _FIRST_TOKENS)

    def _run_alone(self, num_tokens: int) -> Forward:
        forward = self.start([0] * num_tokens, None)
        try:
            forward.run(lambda: False)
        except Exception as error:  # of many kinds, all of them the model's
            raise ModelLoadError(
                f"{type(self.model).__name__}: a pass over {num_tokens} tokens fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        return forward

    def _get(self, result: Any) -> Any:
        names = (self._cache_name, *_CACHE_NAMES)
        return next((result[n] for n in names if n in result and result[n] is not None), None)


def num_tokens(cache: Any) -> int:
    """Tokens of a sequence in its cache."""
    return int(cache.get_seq_length())


def cache_bytes(cache: Any) -> int:
    """Bytes of all storages of a cache's layers; a view of the last tokens holds all of them."""
    found: dict[int, int] = {}
    for layer in cache.layers:
        for value in vars(layer).values():
            items = list(value.values()) if isinstance(value, dict) else value
            for item in items if isinstance(items, (list, tuple)) else [items]:
                if isinstance(item, Tensor) and item.dim() > 1:
                    storage = item.untyped_storage()
                    found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _has_moving_rope(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    kinds = {str(r.get("rope_type") or r.get("type") or "default") for r in nested}
    return any(moving in kind for kind in kinds for moving in _MOVING_ROPE)


def _dynamic_embeddings(model: nn.Module) -> list[Any]:
    """Modules whose frequencies stay with the longest sequence they have seen."""
    needed = ("inv_freq", "original_inv_freq", "max_seq_len_cached", "original_max_seq_len")
    return [
        module
        for module in model.modules()
        if "dynamic" in str(getattr(module, "rope_type", ""))
        and all(hasattr(module, name) for name in needed)
    ]
