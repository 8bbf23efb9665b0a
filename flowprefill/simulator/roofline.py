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

Checks between slices and switches are free.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from flowprefill.granularity import Granularity
from flowprefill.programs.family import ModelSpec
from flowprefill.simulator.cost import LayerTimeline, PassTimeline, Prompts, Stretch, Timeline

_TILE = 128
_INNER_CUTS = (1, 2, 4, 8)
_BYTES = 2
"""Of an element, bf16."""
_CACHED_TIMELINES = 1 << 13


@dataclass(frozen=True)
class DeviceSheet:
    """What a device can do, and which share of it good kernels reach."""

    name: str
    flops: float
    """Dense bf16, per second."""
    bandwidth: float
    """Bytes per second of device memory."""
    memory_bytes: float
    num_processors: int
    """Streaming multiprocessors."""
    product_efficiency: float
    """Of a matrix product whose tiles fill every wave."""
    attention_efficiency: float
    bandwidth_efficiency: float
    launch_s: float
    """Gap between two operators that are launched ahead."""


A800 = DeviceSheet(
    name="A800-80GB",
    flops=312e12,
    bandwidth=2.039e12,
    memory_bytes=80e9,
    num_processors=108,
    product_efficiency=0.62,
    attention_efficiency=0.5,
    bandwidth_efficiency=0.8,
    launch_s=4e-6,
)
"""The arithmetic of an A100 SXM; a whole prefill of Llama-3.1-8B gets some 11,000 tokens/s."""

LLAMA_3_1_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(128_001,),
    bos_token_id=128_000,
)


@dataclass(frozen=True)
class _Product:
    """A matrix product of one layer and the elementwise kernels before and after it."""

    num_inputs: int
    num_outputs: int
    row_bytes: int
    """Elementwise traffic of one row."""


class RooflineCost:
    """Implements CostModel; as a Predictor it speaks of one granularity."""

    speed_factor = 1.0

    def __init__(
        self,
        granularity: Granularity,
        max_slice_s: float = 0.004,
        spec: ModelSpec = LLAMA_3_1_8B,
        device: DeviceSheet = A800,
    ) -> None:
        """max_slice_s: longest slice aimed at, of granularity `tile`."""
        self._granularity = granularity
        self._max_slice_s = max_slice_s
        self._spec = spec
        self._device = device
        self._bytes_per_s = device.bandwidth * device.bandwidth_efficiency
        self._tile_flops = (
            2 * _TILE * device.num_processors
        )  # of a wave, by unit of inner dimension
        q, kv, hidden, inter = spec.q_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
        # Norm with residual: two rows in, two out; rope: q, k, v in and out; silu: two in, one out.
        norm = 4 * hidden
        self._qkv = _Product(hidden, q + 2 * kv, _BYTES * (norm + 2 * (q + 2 * kv)))
        self._o_proj = _Product(q, hidden, 0)
        self._gate_up = _Product(hidden, 2 * inter, _BYTES * (norm + 3 * inter))
        self._down = _Product(inter, hidden, 0)
        self._lm_head = _Product(hidden, spec.vocab_size, _BYTES * norm)
        self._product_s = lru_cache(maxsize=None)(self._compute_product_s)
        self._tile_rows = lru_cache(maxsize=None)(self._compute_tile_rows)
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
            self._product_s(self._qkv, num_seqs),
            attention_s,
            *(self._product_s(product, num_seqs) for product in products),
        ]
        layer = _stretches([(s, s) for s in operators])
        head_s = self._product_s(self._lm_head, num_seqs)
        return LayerTimeline(layer, self._spec.num_layers, [Stretch(head_s, head_s)])

    def _compute_timeline(
        self, prompts: tuple[tuple[int, int], ...], granularity: Granularity
    ) -> Timeline:
        if granularity.kind == "chunk" and len(prompts) == 1:
            chunks = _chunks(prompts[0], granularity.chunk_tokens)
            times = [self._pass_s([chunk], is_final=chunk is chunks[-1]) for chunk in chunks]
            return PassTimeline(list(itertools.accumulate(times)))
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
        attention = self._attention_slices(attention_s) if is_tile else [(attention_s, attention_s)]
        slices = [
            *self._slices(self._qkv, rows, is_tile),
            *attention,
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
        return _stretches([*qkv, (head_s, head_s)])

    def _slices(self, product: _Product, rows: int, is_tile: bool) -> list[tuple[float, float]]:
        """(total, slice) seconds of an operator, the last slice of a tiled one apart."""
        tile_rows = self._tile_rows(product) if is_tile else rows
        if rows <= tile_rows:
            total_s = self._product_s(product, rows)
            return [(total_s, total_s)]
        num_full, rest = divmod(rows, tile_rows)
        tile_s = self._product_s(product, tile_rows)
        full = (num_full * tile_s, tile_s)
        if not rest:
            return [full]
        rest_s = self._product_s(product, rest)
        return [full, (rest_s, rest_s)]

    def _attention_slices(self, total_s: float) -> list[tuple[float, float]]:
        num_slices = -int(-total_s // self._max_slice_s)
        total_s += (num_slices - 1) * self._device.launch_s
        return [(total_s, total_s / num_slices)]

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
        products = (self._qkv, self._o_proj, self._gate_up, self._down)
        return sum(self._product_s(product, rows) for product in products)

    def _compute_product_s(self, product: _Product, rows: int) -> float:
        device, tile_rows = self._device, _tile_rows_of(rows)
        tiles = -(-rows // tile_rows) * -(-product.num_outputs // _TILE)
        peak = device.flops * device.product_efficiency
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
        return operator_s + elementwise_s + device.launch_s

    def _prompt_attention_s(self, prompt: tuple[int, int]) -> float:
        end, start = prompt
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        return self._attention_s(end - start, end, pairs)

    def _attention_s(self, rows: int, num_keys: int, pairs: int) -> float:
        """`rows` query rows over `num_keys` keys; `pairs` of them are not masked."""
        device, spec = self._device, self._spec
        tile_rows = _tile_rows_of(rows)
        padded = -(-rows // tile_rows) * tile_rows
        flops = 4 * spec.q_size * pairs * padded / rows
        traffic = _BYTES * (2 * spec.kv_size * num_keys + 2 * spec.q_size * rows)
        arithmetic_s = flops / (device.flops * device.attention_efficiency)
        return max(arithmetic_s, traffic / self._bytes_per_s) + device.launch_s

    def _head_s(self, prompts: Prompts) -> float:
        """The last layer behind its keys and values, and the logits, for each prompt's last row."""
        rows = len(prompts)
        keys = sum(end for end, _ in prompts)
        layer_s = self._rows_s(rows) + self._attention_s(rows, keys, keys)
        return layer_s + self._product_s(self._lm_head, rows)


def num_kv_tokens(
    spec: ModelSpec = LLAMA_3_1_8B, device: DeviceSheet = A800, memory_share: float = 0.9
) -> int:
    """Tokens whose keys and values fit beside the weights into that share of the memory."""
    q, kv, hidden = spec.q_size, spec.kv_size, spec.hidden_size
    layer = hidden * (2 * q + 2 * kv + 3 * spec.intermediate_size)
    weights = spec.num_layers * layer + 2 * spec.vocab_size * hidden
    token_bytes = 2 * _BYTES * kv * spec.num_layers
    return int((memory_share * device.memory_bytes - _BYTES * weights) / token_bytes)


def _tile_rows_of(rows: int) -> int:
    """Rows of a kernel's tile: 128, or the next power of two from 16 on for fewer rows."""
    return min(_TILE, max(16, 1 << (rows - 1).bit_length()))


def _chunks(prompt: tuple[int, int], size: int) -> list[tuple[int, int]]:
    """The passes over a prompt: (end, start) of each."""
    end, start = prompt
    edges = [start, *range((start // size + 1) * size, end, size), end]
    return [(high, low) for low, high in itertools.pairwise(edges)]


def _stretches(slices: Sequence[tuple[float, float]]) -> list[Stretch]:
    ends_s = itertools.accumulate(total_s for total_s, _ in slices)
    return [Stretch(end_s, s) for end_s, (_, s) in zip(ends_s, slices, strict=True)]
