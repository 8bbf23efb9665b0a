"""The operators of a decoder of the Llama kind in the native kernels of a CPU.

Weights are packed once, in the order in which the kernels read them, on huge pages.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from flowprefill.huge_pages import Arena, aligned
from flowprefill.kv.cache import GROUP, KVCache
from flowprefill.native.library import (
    AMX_FLAG,
    BF16_FLAG,
    LayerPointers,
    ModelShape,
    NativeUnavailableError,
    load_library,
)
from flowprefill.ops.attention import query_scale
from flowprefill.ops.rope import RotaryTable
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.operators import Attended, Rows, SliceRun
from flowprefill.programs.rope_frequencies import rope_frequencies
from flowprefill.programs.weights import DecoderWeights, LayerWeights

_PAIR_COLUMNS = 2 * GROUP
_MAX_HEAD_DIM = 256


def check_support(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, cpu_flags: frozenset[str]
) -> None:
    """Raises NativeUnavailableError if the kernels cannot, or should not, run this model."""
    if dtype == torch.bfloat16 and BF16_FLAG not in cpu_flags:
        raise NativeUnavailableError(f"bfloat16 needs {BF16_FLAG}")
    if dtype == torch.bfloat16 and AMX_FLAG in cpu_flags:
        raise NativeUnavailableError("torch uses this processor's AMX, which they do not")
    sizes = {
        "hidden_size": spec.hidden_size,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate_size,
        "block_size": block_size,
    }
    for name, size in sizes.items():
        if size % GROUP:
            raise NativeUnavailableError(f"{name}={size}: must be a multiple of {GROUP}")
    if spec.head_dim > _MAX_HEAD_DIM:
        raise NativeUnavailableError(f"head_dim={spec.head_dim}: at most {_MAX_HEAD_DIM}")


class NativeOperators:
    """Implements Operators. One thread calls; the kernels have threads of their own."""

    runs_several_slices = True

    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, cache: KVCache, num_threads: int
    ) -> None:
        """Takes the layers out of `weights`, so that no second copy of them stays.

        cache: packed
        """
        assert cache.is_packed
        self.cache = cache
        self._spec = spec
        self._embed = weights.embed
        self._norm = weights.norm
        dtype = weights.embed.dtype
        arena = Arena(_packed_bytes(spec, dtype))
        self._layers = [
            _PackedLayer(spec, weights.layers.pop(0), arena, cache.k[i], cache.v[i])
            for i in range(spec.num_layers)
        ]
        self._pointers = array("q", [ctypes.addressof(layer.pointers) for layer in self._layers])
        self._lm_head = pack(weights.lm_head, arena)
        rotary = RotaryTable(
            rope_frequencies(spec), spec.max_position_embeddings, torch.device("cpu")
        )
        self._rotary = rotary  # the kernels read it
        shape = ModelShape(
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.intermediate_size,
            cache.block_size,
            spec.rms_norm_eps,
            query_scale(spec.head_dim),
            rotary.cos.data_ptr(),
            rotary.sin.data_ptr(),
        )
        self._library = library = load_library()
        is_bf16 = dtype == torch.bfloat16
        self._decoder = library.flowprefill_open(ctypes.addressof(shape), is_bf16, num_threads)
        closing = weakref.finalize(self, library.flowprefill_close, self._decoder)
        # at exit another thread may still be in the kernels; the process frees what is left
        closing.atexit = False

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        return self._embed[torch.tensor(token_ids)]

    def qkv(self, layer: int, hidden: Tensor, rows: Rows, q: Tensor) -> None:
        self._library.flowprefill_qkv(
            self._decoder,
            self._pointers[layer],
            _address(hidden),
            _address(q),
            _address(rows.positions),
            _address(rows.slots),
            len(hidden),
        )

    def attention(self, layer: int, q: Tensor, attended: Attended, run: SliceRun) -> int:
        addresses = attended.addresses
        num_seqs = len(addresses.first)
        if num_seqs == 1:
            num_run: int = self._library.flowprefill_attention_slices(
                self._decoder,
                self._pointers[layer],
                _address(q),
                addresses.tables[0],
                addresses.first[0],
                *_slices(run),
            )
            return num_run
        self._library.flowprefill_attention(
            self._decoder,
            self._pointers[layer],
            _address(q),
            addresses.tables.buffer_info()[0],
            addresses.first.buffer_info()[0],
            num_seqs,
            len(q) // num_seqs,
        )
        return 1

    def mlp(self, layer: int, hidden: Tensor, attended: Tensor, run: SliceRun) -> int:
        num_run: int = self._library.flowprefill_mlp(
            self._decoder,
            self._pointers[layer],
            _address(hidden),
            _address(attended),
            *_slices(run),
        )
        return num_run

    def layers(
        self, layers: range, hidden: Tensor, rows: Rows, q: Tensor, attended: Attended
    ) -> None:
        addresses = attended.addresses
        self._library.flowprefill_layers(
            self._decoder,
            self._pointers.buffer_info()[0] + layers.start * self._pointers.itemsize,
            len(layers),
            _address(hidden),
            _address(q),
            _address(rows.positions),
            _address(rows.slots),
            addresses.tables.buffer_info()[0],
            addresses.first.buffer_info()[0],
            len(hidden),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.empty(len(hidden), self._spec.vocab_size)
        self._library.flowprefill_logits(
            self._decoder,
            _address(self._norm),
            _address(self._lm_head),
            self._spec.vocab_size,
            _address(hidden),
            len(hidden),
            _address(out),
        )
        return out


class _PackedLayer:
    """One layer's weights as the kernels want them, and where they lie."""

    def __init__(
        self, spec: ModelSpec, weights: LayerWeights, arena: Arena, k: Tensor, v: Tensor
    ) -> None:
        # gate and up by turns, 16 columns each, so that one tile of sums has what belongs together
        halves = weights.gate_up.view(2, -1, GROUP, spec.hidden_size)
        gate_up = halves.transpose(0, 1).reshape(weights.gate_up.shape)
        bias = weights.qkv_bias
        self._tensors = {
            "input_norm": weights.input_norm,
            "qkv": pack(weights.qkv, arena),
            "qkv_bias": None if bias is None else bias.float(),
            "q_norm": weights.q_norm,
            "k_norm": weights.k_norm,
            "o_proj": pack(weights.o_proj, arena),
            "post_norm": weights.post_norm,
            "gate_up": pack(gate_up, arena),
            "down": pack(weights.down, arena),
            "k_cache": k,
            "v_cache": v,
        }
        self.pointers = LayerPointers(
            **{name: t if t is None else _address(t) for name, t in self._tensors.items()}
        )


def pack(weight: Tensor, arena: Arena) -> Tensor:
    """[columns, inner] -> pairs of panels, [pairs, inner / P, 2, 16, P], zeros behind the last
    column (native/src/product.h)."""
    columns, inner = weight.shape
    pairs = -(-columns // _PAIR_COLUMNS)
    values = 4 // weight.dtype.itemsize  # P
    packed = arena.take((pairs, inner // values, 2, GROUP, values), weight.dtype)
    # as words, which are moved whole
    words = weight.contiguous().view(torch.int32).view(columns, inner // values)
    into = packed.view(torch.int32).view(pairs, inner // values, _PAIR_COLUMNS).transpose(1, 2)
    whole = columns // _PAIR_COLUMNS
    into[:whole].copy_(words[: whole * _PAIR_COLUMNS].view(whole, _PAIR_COLUMNS, inner // values))
    if whole < pairs:
        rest = words[whole * _PAIR_COLUMNS :]
        into[whole, : len(rest)].copy_(rest)
    return packed


def _packed_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Of all that is packed."""

    def size(columns: int, inner: int) -> int:
        return aligned(-(-columns // _PAIR_COLUMNS) * _PAIR_COLUMNS * inner * dtype.itemsize)

    hidden = spec.hidden_size
    layer = (
        size(spec.q_size + 2 * spec.kv_size, hidden)
        + size(hidden, spec.q_size)
        + size(2 * spec.intermediate_size, hidden)
        + size(hidden, spec.intermediate_size)
    )
    return spec.num_layers * layer + size(spec.vocab_size, hidden)


def _slices(run: SliceRun) -> tuple[int, int, int | None, bool]:
    """The last arguments of a function that runs slices."""
    address, count = run.ends.buffer_info()
    return address, count, run.interrupt.address if run.interrupt else None, run.may_leave


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous()
    return tensor.data_ptr()
