"""The caches of several sequences as one, for a decode step. The only file that needs transformers'
cache classes.

New keys and values go straight into the sequences' own caches. What attention reads is put side by
side layer by layer, each sequence at the right edge; it lives as long as that layer's attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer


class _JoinedLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of several sequences, each of which has a DynamicLayer of its own."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layers = layers
        self.longest: int = max(layer.get_seq_length() for layer in layers)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """key_states, value_states: [sequences, heads, 1, head_dim]"""
        self.longest += 1
        for row, layer in enumerate(self._layers):
            layer.update(key_states[row : row + 1], value_states[row : row + 1])
        keys = torch.cat([_pad_left(layer.keys, self.longest) for layer in self._layers])
        values = torch.cat([_pad_left(layer.values, self.longest) for layer in self._layers])
        return keys, values

    def get_seq_length(self) -> int:
        return self.longest

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """query_length: in transformers 4 the positions of the queries"""
        num_queries = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self.longest + num_queries, 0


def joined(caches: Sequence[Any]) -> Any:
    """One cache of sequences whose layers are all plain DynamicLayers."""
    layers: list[Any] = [_JoinedLayer(x) for x in zip(*(c.layers for c in caches), strict=True)]
    return Cache(layers=layers)


def _pad_left(rows: Tensor, length: int) -> Tensor:
    """rows: [1, heads, tokens, head_dim]. What is in front is masked and only has to be finite."""
    return nn.functional.pad(rows, (0, 0, length - rows.shape[-2], 0))
