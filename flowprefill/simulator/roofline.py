"""RooflineCost: task times from a model's shape and a device's data sheet. Nothing is measured.

An operator takes the longer of its arithmetic and its memory traffic, then its elementwise kernels
and a launch gap:

- A matrix product is cut into output tiles of up to 128 x 128 that run in waves over the device's
  processors; few tiles are cut along the inner dimension too and added up, whichever is faster. So
  a pass over few rows wastes part of its last wave, which is what small chunks pay.
- Every pass reads each weight once, and attention reads the keys and values of all earlier tokens
  once. Attention works on blocks of 128 query rows and always fills the device, which flatters
  chunks.
- The last layer runs for the last row of each prompt only, as in the native program.
- Tensor parallel ranks add up their shares of the attention's and of the MLP's output, each with a
  ring all-reduce behind the product, which nothing hides.

Checks between slices and switches are free. Devices, models and efficiencies: data_sheets.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flowprefill.granularity import Granularity
from flowprefill.programs.family import ModelSpec
from flowprefill.simulator.cost import LayerTimeline, PassTimeline, Prompts, Stretch, Timeline
from flowprefill.simulator.data_sheets import A800, EFFICIENCY, LLAMA_3_1_8B, DeviceSheet, shard

_TILE = 128
_INNER_CUTS = (1, 2, 4, 8)
_BYTES = 2
"""Of an element, bf16."""
_CACHED_TIMELINES = 1 << 13

_Slices = tuple[str, float, float]
"""Slices of one operator: what it is called, seconds of all together, and of one."""


@dataclass(frozen=True)
class _Product:
    """A matrix product of one layer and the elementwise kernels before and after it."""

    group: str
    """What a timeline calls it."""
    num_inputs: int
    num_outputs: int
    row_bytes: int
    """Elementwise traffic of one row."""
    is_partial: bool = False
    """The ranks' outputs have to be added up."""


class RooflineCost:
    """Implements CostModel; as a Predictor it speaks of one granularity."""

    speed_factor = 1.0

    def __init__(
        self,
        granularity: Granularity,
        max_slice_s: float = 0.004,
        spec: ModelSpec = LLAMA_3_1_8B,
        device: DeviceSheet = A800,
        tensor_parallel: int = 1,
    ) -> None:
        """max_slice_s: longest slice aimed at, of granularity `tile`
        spec: of the whole model; tensor_parallel: devices that share it, which all do the same
        """
        spec = shard(spec, tensor_parallel)
        self._granularity = granularity
        self._max_slice_s = max_slice_s
        self._spec = spec
        self._device = device
        self._num_ranks = tensor_parallel
        self._bytes_per_s = device.bandwidth * EFFICIENCY.bandwidth
        q, kv, hidden, inter = spec.q_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
        # Norm with residual: two rows in, two out; rope: q, k, v in and out; silu: two in, one out.
        norm = 4 * hidden
        self._qkv = _Product("qkv", hidden, q + 2 * kv, _BYTES * (norm + 2 * (q + 2 * kv)))
        self._o_proj = _Product("o_proj", q, hidden, 0, is_partial=True)
        self._gate_up = _Product("gate_up", hidden, 2 * inter, _BYTES * (norm + 3 * inter))
        self._down = _Product("down", inter, hidden, 0, is_partial=True)
        self._layer_products = (self._qkv, self._o_proj, self._gate_up, self._down)
        self._lm_head = _Product("lm_head", hidden, spec.vocab_size, _BYTES * norm)
        self._product_s = lru_cache(maxsize=None)(self._compute_product_s)
        self._tile_rows = lru_cache(maxsize=None)(self._compute_tile_rows)
        self._least_row_s = lru_cache(maxsize=None)(self._compute_least_row_s)
        self._timeline = lru_cache(maxsize=_CACHED_TIMELINES)(self._compute_timeline)

    # ---- Predictor ----------------------------------------------------------------------------

    @cached_property
    def saturation_tokens(self) -> int:
        """Rows of which two passes take no longer than one of twice the rows, within 5%."""
        rows = _TILE
        while 2 * self._rows_s(rows) > 1.05 * self._rows_s(2 * rows):
            rows += _TILE
        return rows

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        return self.timeline(((num_tokens, num_cached_tokens),), self._granularity).total_s

    def packed_prefill_s(self, prompts: Prompts) -> float:
        return self.timeline(prompts, self._granularity).total_s

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        return self.step_timeline(num_seqs, num_context_tokens).total_s

    # ---- timelines ----------------------------------------------------------------------------

    def timeline(self, prompts: Prompts, granularity: Granularity) -> Timeline:
        """See CostModel. As in the native program, chunks are cut at multiples of their size in a
        prompt, and packed prompts are one pass."""
        return self._timeline(tuple(prompts), granularity)

    def step_timeline(self, num_seqs: int, num_context_tokens: int) -> Timeline:
        """See CostModel: left after any operator."""
        attention_s = self._attention_s(num_seqs, num_context_tokens, num_context_tokens)
        products = (self._o_proj, self._gate_up, self._down)
        operators = [
            *self._slices(self._qkv, num_seqs, is_tile=False),
            ("attention", attention_s, attention_s),
            *(x for product in products for x in self._slices(product, num_seqs, is_tile=False)),
        ]
        layer = _stretches(operators)
        head_s = self._product_s(self._lm_head, num_seqs)
        return LayerTimeline(layer, self._spec.num_layers, [Stretch(head_s, head_s, "head")])

    def _compute_timeline(
        self, prompts: tuple[tuple[int, int], ...], granularity: Granularity
    ) -> Timeline:
        if granularity.kind == "chunk" and len(prompts) == 1:
            chunks = granularity.chunks(*prompts[0])
            times = [self._pass_s([chunk], is_final=chunk is chunks[-1]) for chunk in chunks]
            return PassTimeline(list(itertools.accumulate(times)), group="chunk")
        if granularity.kind in ("whole", "chunk"):
            return PassTimeline([self._pass_s(prompts, is_final=True)])
        layer, last = self._layer(prompts, granularity), self._last_layer(prompts, granularity)
        return LayerTimeline(layer, self._spec.num_layers - 1, last)

    def _pass_s(self, prompts: Prompts, is_final: bool) -> float:
        rows = sum(end - start for end, start in prompts)
        qkv_s = self._product_s(self._qkv, rows)
        layer_s = self._rows_s(rows) + sum(self._prompt_attention_s(p) for p in prompts)
        head_s = self._head_s(prompts) if is_final else 0.0
        return (self._spec.num_layers - 1) * layer_s + qkv_s + head_s

    def _layer(self, prompts: Prompts, granularity: Granularity) -> list[Stretch]:
        """Stretches of a layer that runs for all rows."""
        rows = sum(end - start for end, start in prompts)
        attention_s = sum(self._prompt_attention_s(p) for p in prompts)
        if granularity.kind == "layer":
            total_s = self._rows_s(rows) + attention_s
            return [Stretch(total_s, total_s)]
        is_tile = granularity.kind == "tile"
        attention = ("attention", attention_s, attention_s)
        slices = [
            *self._slices(self._qkv, rows, is_tile),
            self._attention_slices(attention_s) if is_tile else attention,
            *self._slices(self._o_proj, rows, is_tile),
            *self._slices(self._gate_up, rows, is_tile),
            *self._slices(self._down, rows, is_tile),
        ]
        return _stretches(slices)

    def _last_layer(self, prompts: Prompts, granularity: Granularity) -> list[Stretch]:
        """Stretches of the last layer: keys and values of all rows, the rest for the last ones."""
        rows = sum(end - start for end, start in prompts)
        head_s = self._head_s(prompts)
        if granularity.kind == "layer":
            total_s = self._product_s(self._qkv, rows) + head_s
            return [Stretch(total_s, total_s)]
        qkv = self._slices(self._qkv, rows, granularity.kind == "tile")
        return _stretches([*qkv, ("head", head_s, head_s)])

    def _slices(self, product: _Product, rows: int, is_tile: bool) -> list[_Slices]:
        """Slices of a product, the last one of a tiled one apart."""
        tile_rows = self._tile_rows(product) if is_tile else rows
        if rows <= tile_rows:
            total_s = self._product_s(product, rows)
            return [(product.group, total_s, total_s)]
        num_full, rest = divmod(rows, tile_rows)
        tile_s = self._product_s(product, tile_rows)
        full = (product.group, num_full * tile_s, tile_s)
        if not rest:
            return [full]
        rest_s = self._product_s(product, rest)
        return [full, (product.group, rest_s, rest_s)]

    def _attention_slices(self, total_s: float) -> _Slices:
        num_slices = -int(-total_s // self._max_slice_s)
        total_s += (num_slices - 1) * EFFICIENCY.launch_s
        return "attention", total_s, total_s / num_slices

    def _compute_tile_rows(self, product: _Product) -> int:
        """Rows of a tile: the multiple of 128 within max_slice_s that takes least time per row."""
        fitting = itertools.takewhile(
            lambda rows: rows == _TILE or self._product_s(product, rows) <= self._max_slice_s,
            itertools.count(_TILE, _TILE),
        )
        return min(fitting, key=lambda rows: self._product_s(product, rows) / rows)

    # ---- operators ----------------------------------------------------------------------------

    def _rows_s(self, rows: int) -> float:
        """Seconds of a layer without its attention."""
        return sum(self._product_s(product, rows) for product in self._layer_products)

    def _compute_product_s(self, product: _Product, rows: int) -> float:
        device, tile_rows = self._device, _tile_rows_of(rows)
        tiles = -(-rows // tile_rows) * -(-product.num_outputs // _TILE)
        peak = device.flops * EFFICIENCY.product
        wave_s = 2 * tile_rows * _TILE * product.num_inputs * device.num_processors / peak
        outputs = rows * product.num_outputs
        arithmetic_s = min(
            -(-tiles * cuts // device.num_processors) * wave_s / cuts
            # partial sums in fp32, written and read again
            + (8 * outputs * cuts / self._bytes_per_s if cuts > 1 else 0.0)
            for cuts in _INNER_CUTS
        )
        weights = product.num_inputs * product.num_outputs
        traffic = _BYTES * (weights + rows * product.num_inputs + outputs)
        elementwise_s = rows * product.row_bytes / self._bytes_per_s
        operator_s = max(arithmetic_s, traffic / self._bytes_per_s)
        reduction_s = self._all_reduce_s(_BYTES * outputs) if product.is_partial else 0.0
        return operator_s + elementwise_s + EFFICIENCY.launch_s + reduction_s

    def _all_reduce_s(self, num_bytes: int) -> float:
        """Sum over the ranks of so many bytes on each, by a ring."""
        if self._num_ranks == 1:
            return 0.0
        sent = 2 * (self._num_ranks - 1) / self._num_ranks * num_bytes
        return EFFICIENCY.all_reduce_s + sent / (self._device.link_bandwidth * EFFICIENCY.link)

    def _prompt_attention_s(self, prompt: tuple[int, int]) -> float:
        end, start = prompt
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        return self._attention_s(end - start, end, pairs)

    def _attention_s(self, rows: int, num_keys: int, pairs: int) -> float:
        """`rows` query rows over `num_keys` keys; `pairs` of them are not masked."""
        tile_rows = _tile_rows_of(rows)
        padded = -(-rows // tile_rows) * tile_rows
        return self._dense_attention_s(rows, num_keys, pairs * padded / rows) + EFFICIENCY.launch_s

    def _dense_attention_s(self, rows: int, num_keys: int, pairs: float) -> float:
        """The same without launch, where only `pairs` are computed."""
        spec = self._spec
        traffic = _BYTES * (2 * spec.kv_size * num_keys + 2 * spec.q_size * rows)
        arithmetic_s = 4 * spec.q_size * pairs / (self._device.flops * EFFICIENCY.attention)
        return max(arithmetic_s, traffic / self._bytes_per_s)

    def _head_s(self, prompts: Prompts) -> float:
        """The last layer behind its keys and values, and the logits, for each prompt's last row."""
        rows = len(prompts)
        keys = sum(end for end, _ in prompts)
        layer_s = self._rows_s(rows) + self._attention_s(rows, keys, keys)
        return layer_s + self._product_s(self._lm_head, rows)

    # ---- a lower bound ------------------------------------------------------------------------

    def least_prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        """Device seconds that a prompt adds at least, alone or packed, at any granularity.

        Its rows go through each product at the best rate of any pass that can hold them: of its
        own rows, cut anywhere, or of packs of up to saturation_tokens. Attention is computed
        without padding and reads keys and values once.
        """
        rows = num_tokens - num_cached_tokens
        max_rows = max(rows, self.saturation_tokens)
        row_s = sum(self._least_row_s(product, max_rows) for product in self._layer_products)
        pairs = (num_tokens * (num_tokens + 1) - num_cached_tokens * (num_cached_tokens + 1)) // 2
        attention_s = self._dense_attention_s(rows, num_tokens, pairs) + EFFICIENCY.launch_s
        layer_s = rows * row_s + attention_s
        last_layer_s = rows * self._least_row_s(self._qkv, max_rows)
        head_s = row_s + self._least_row_s(self._lm_head, max_rows)
        head_s += self._dense_attention_s(1, num_tokens, num_tokens)
        return (self._spec.num_layers - 1) * layer_s + last_layer_s + head_s

    def _compute_least_row_s(self, product: _Product, max_rows: int) -> float:
        """Least seconds per row of passes of up to max_rows rows. Within a tile a product's time
        grows by a constant per row or less: full tiles are best, but for the last one."""
        counts = (16, 32, 64, *range(_TILE, max_rows + 1, _TILE), max_rows)
        return float(min(self._product_s(product, rows) / rows for rows in counts))


def num_kv_tokens(
    spec: ModelSpec = LLAMA_3_1_8B, device: DeviceSheet = A800, memory_share: float = 0.9
) -> int:
    """Tokens whose keys and values fit beside the weights into that share of the memory.

    spec: what the device holds, a rank's shard of the model
    """
    q, kv, hidden = spec.q_size, spec.kv_size, spec.hidden_size
    layer = hidden * (2 * q + 2 * kv + 3 * spec.intermediate_size)
    weights = spec.num_layers * layer + 2 * spec.vocab_size * hidden
    token_bytes = 2 * _BYTES * kv * spec.num_layers
    return int((memory_share * device.memory_bytes - _BYTES * weights) / token_bytes)


def _tile_rows_of(rows: int) -> int:
    """Rows of a kernel's tile: 128, or the next power of two from 16 on for fewer rows."""
    return min(_TILE, max(16, 1 << (rows - 1).bit_length()))


def _stretches(slices: Sequence[_Slices]) -> list[Stretch]:
    ends_s = itertools.accumulate(total_s for _, total_s, _ in slices)
    return [Stretch(end_s, s, group) for end_s, (group, _, s) in zip(ends_s, slices, strict=True)]
