"""CausalLM: the calls that passes make of a transformers model, and what its cache object allows.

Knows no requests. Argument names differ between versions of transformers and are found once. What a
cache allows is tried once, on a few tokens: some models keep states elsewhere, or count positions
in their own way.
"""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowprefill.errors import ModelLoadError, UnsupportedArchitectureError
from flowprefill.hooks.availability import rope_scalings, rope_type, text_config
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
_TRIES = 2
"""Of what a cache allows: where experts are chosen, rounding alone may change the logits once."""
_SAME = 0.3
"""Distance of two rows of logits, as a share of their spread, up to which rounding may explain it:
bf16 gives 0.08 in SmolLM2, where a wrong position gives 0.8."""


class CausalLM:
    """One transformers model with boundaries. Its hooks stay for its life."""

    def __init__(self, model: nn.Module, class_names: Sequence[str] = ()) -> None:
        """class_names: of the boundary modules, as in find_boundaries. Raises ConfigError, and
        UnsupportedArchitectureError if the model cannot decode with the cache that it returns."""
        self.model = model
        self.boundaries = find_boundaries(model, class_names)
        hook(self.boundaries.modules)
        self._device = next(model.parameters()).device
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = next((n for n in _CACHE_NAMES if n in parameters), _CACHE_NAMES[1])
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._takes_positions = "position_ids" in parameters
        self._gives_positions = False
        is_moving = _has_moving_rope(model)
        self._moving = _dynamic_embeddings(model) if is_moving else []
        self._probe(is_moving)

    def arguments(self, token_ids: Sequence[int], cache: Any, start: int = 0) -> dict[str, Any]:
        """Of a call of the model: tokens behind the `start` ones in `cache`; None = the first."""
        arguments = {"input_ids": to_device([token_ids], self._device)}
        if cache is not None:
            arguments[self._cache_name] = cache
            if self._gives_positions:
                positions = range(start, start + len(token_ids))
                arguments["position_ids"] = to_device([positions], self._device)
        return {**arguments, "use_cache": True, **self._last_only}

    def start(self, token_ids: Sequence[int], cache: Any, start: int = 0) -> Forward:
        """A pass of these arguments."""
        return self._forward(self.arguments(token_ids, cache, start))

    def start_probe(self, token_ids: Sequence[int], cache: Any, start: int = 0) -> Forward:
        """A pass of these arguments that gives the logits of all tokens."""
        arguments = self.arguments(token_ids, cache, start)
        return self._forward({k: v for k, v in arguments.items() if k not in self._last_only})

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
        """Run some tokens: how many boundaries a pass has, what the cache is, how large, and what
        may be done with it."""
        tokens = _different_tokens(self.model)
        first = self._run_alone(tokens[:_FIRST_TOKENS])
        self.num_slices = first.num_boundaries + 1
        cache = self._get(first.result)
        if cache is None or not getattr(cache, "layers", None):
            raise self._unsupported("returns no cache of its layers, which decoding needs")
        longer = self._run_alone(tokens)
        sizes = cache_bytes(cache), cache_bytes(self._get(longer.result))
        self.token_bytes = max(0, sizes[1] - sizes[0]) // (_MORE_TOKENS - _FIRST_TOKENS)
        self.sequence_bytes = max(0, sizes[0] - self.token_bytes * _FIRST_TOKENS)
        self.free_keys = _weight_bytes(self.model) // (4 * max(1, self.token_bytes))
        """Keys that a decode step may read in vain: a quarter of the weights, which each further
        batch reads again."""
        kinds = {type(layer).__name__ for layer in cache.layers}
        self.cache_kinds = ", ".join(sorted(kinds))
        logits = longer.result.logits[0].float()
        self.num_logits = logits.shape[-1]
        """Of a token: the ids that the model can choose from."""
        trial, other = self._decoding(tokens, logits)
        may_continue = kinds <= _CONTINUED and not is_moving
        self.is_continued = may_continue and any(trial.add(3) for _ in range(_TRIES))
        is_plain = kinds <= _BATCHED and type(cache).__name__ == "DynamicCache"
        may_batch = self.is_continued and is_plain and self._takes_positions
        self.is_batched = may_batch and any(trial.add_beside(other) for _ in range(_TRIES))

    def _decoding(self, tokens: Sequence[int], expected: Tensor) -> tuple[_Trial, _Trial]:
        """A sequence to which a token could be added after another's pass, if need be with its
        position; and that other one.

        Raises UnsupportedArchitectureError.
        """
        ways = (*[False] * _TRIES, self._takes_positions)
        for length, self._gives_positions in enumerate(ways, _FIRST_TOKENS):
            trial, other = (_Trial(self, tokens, expected) for _ in range(2))
            trial.add(length)
            other.add(length // 2)
            if trial.add(1):
                return trial, other
        raise self._unsupported("fails with its cache, or gives other logits than without")

    def _run_alone(self, token_ids: Sequence[int]) -> Forward:
        forward = self.start_probe(token_ids, None)
        try:
            forward.run(lambda: False)
        except Exception as error:  # of many kinds, all of them the model's
            raise ModelLoadError(
                f"{type(self.model).__name__}: a pass over {len(token_ids)} tokens fails: "
                f"{type(error).__name__}: {error}"
            ) from error
        return forward

    def _unsupported(self, problem: str) -> UnsupportedArchitectureError:
        return UnsupportedArchitectureError(f"{type(self.model).__name__}: the model {problem}")

    def _get(self, result: Any) -> Any:
        names = (self._cache_name, *_CACHE_NAMES)
        return next((result[n] for n in names if n in result and result[n] is not None), None)


@dataclass
class _Trial:
    """A sequence whose logits are held against those of one pass over all its tokens."""

    lm: CausalLM
    tokens: Sequence[int]
    expected: Tensor
    """[tokens, vocab] of that pass."""
    cache: Any = None
    num_tokens: int = 0
    """In the cache."""

    def add(self, count: int) -> bool:
        """Whether `count` tokens more can be computed, and their logits are the same."""
        start, end = self.num_tokens, self.num_tokens + count
        forward = _done(lambda: self.lm.start_probe(self.tokens[start:end], self.cache, start))
        if forward is None:
            return False
        self.cache, self.num_tokens = self.lm.cache_of(forward), end
        return _is_same(forward.result.logits[0].float(), self.expected[start:end])

    def add_beside(self, other: _Trial) -> bool:
        """Whether the next token of both can be computed in one batch."""
        ends, caches = [self.num_tokens, other.num_tokens], [self.cache, other.cache]
        forward = _done(lambda: self.lm.start_batch([self.tokens[i] for i in ends], caches))
        if forward is None:
            return False
        self.num_tokens += 1
        other.num_tokens += 1
        return _is_same(self.lm.logits_of(forward), self.expected[ends])


def _done(start: Callable[[], Forward]) -> Forward | None:
    """The pass, at its end; None if it fails."""
    try:
        forward = start()
        forward.run(lambda: False)
    except Exception:  # of many kinds, all of them the model's
        return None
    return forward


def _is_same(logits: Tensor, expected: Tensor) -> bool:
    """Whether rows of logits are the same but for rounding."""
    usual = expected.abs() < 1e6  # some models forbid tokens by the lowest number there is
    for row, wanted, is_usual in zip(logits, expected, usual, strict=True):
        wanted = wanted[is_usual]
        distance = (row[is_usual] - wanted).norm()
        if not distance <= _SAME * (wanted - wanted.mean()).norm():
            return False
    return True


def _different_tokens(model: nn.Module) -> list[int]:
    """Where all are the same, no position and no state matters; padding may have no position."""
    config = _text_config(model)
    padding = getattr(config, "pad_token_id", None)
    tokens = [i for i in range(getattr(config, "vocab_size", None) or 0) if i != padding]
    return random.Random(0).choices(tokens or [0], k=_MORE_TOKENS)


def _weight_bytes(model: nn.Module) -> int:
    return sum(w.nbytes for w in itertools.chain(model.parameters(), model.buffers()))


def num_tokens(cache: Any) -> int:
    """Tokens of a sequence in its cache."""
    return int(cache.get_seq_length())


def cache_bytes(cache: Any) -> int:
    """Bytes of all storages of a cache and its layers; a view of the last tokens holds all of
    them."""
    found: dict[int, int] = {}
    for value in itertools.chain(*(vars(holder).values() for holder in (cache, *cache.layers))):
        items = list(value.values()) if isinstance(value, dict) else value
        for item in items if isinstance(items, (list, tuple)) else [items]:
            if isinstance(item, Tensor) and item.dim() > 1:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def _text_config(model: nn.Module) -> Any:
    """None = the model has no configuration."""
    config = getattr(model, "config", None)
    return None if config is None else text_config(config)


def _has_moving_rope(model: nn.Module) -> bool:
    kinds = map(rope_type, rope_scalings(_text_config(model)))
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
