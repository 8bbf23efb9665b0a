"""Causal attention over the paged KV cache: online softmax over key tiles at fixed absolute edges.

Every row sees the same key tiles, whatever other rows are in the call: tile edges are constants of
the position, a tile is always computed over its full width, and keys after the row's own position
are masked (a fully masked tile leaves maximum, sum and accumulator as they are, bit for bit).
Scores, running maximum, sum and accumulator are fp32; in bf16 the products take bf16 operands.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import MAX_KEY_TILE
from flowprefill.kv.host_copies import to_device

_FIRST_EDGES = (0, 128, 512, 1024)
"""Narrow tiles first, so that a short context does not pay for a wide one; all block-aligned."""
_GRAIN, _VECTOR = 32768, 32
"""Elements of a thread's smallest share of an element-wise operator, and of its unrolled loop."""
_MIN_ROWS = 16
"""Rows of a product below which some kernels switch to code with other rounding (docs/log.md)."""


def query_scale(head_dim: int) -> float:
    """Factor for q: the softmax scale, and log2(e) because exponentials are taken to base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)


def key_tiles(num_keys: int) -> Iterator[tuple[int, int]]:
    """(start, end) of the key tiles that cover positions 0..num_keys."""
    start, index = 0, 0
    while start < num_keys:
        index += 1
        is_early = index < len(_FIRST_EDGES)
        end = _FIRST_EDGES[index] if is_early else start + MAX_KEY_TILE
        yield start, end
        start = end


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Sequence[BlockTable], first: Sequence[int]
) -> Tensor:
    """Attention of the same number of consecutive query rows of each of several sequences.

    q:       [num_seqs, num_rows, num_heads, head_dim] bf16 or fp32, already times query_scale
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of one layer, same dtype
    tables:  block table of each sequence, in order of descending `first`
    first:   position of each sequence's first query row; row r attends to positions <= first + r
    Returns the shape and dtype of q.
    FlashAttention-2, https://arxiv.org/abs/2307.08691, Algorithm 1, one query block.
    """
    num_seqs, num_rows, num_heads = q.shape[:3]
    kv_heads = k_cache.shape[2]
    grouped = _group_heads(q, kv_heads)  # [seqs * kv_heads, rows * group (padded), head_dim]
    maximum = grouped.new_full((*grouped.shape[:2], 1), -math.inf)
    total = torch.zeros_like(maximum)
    out = torch.zeros_like(grouped)
    for start, end in key_tiles(first[0] + num_rows):
        active = sum(f + num_rows > start for f in first)  # a prefix: `first` descends
        rows = slice(0, active * kv_heads)
        k = _gather(k_cache, tables[:active], start, end)
        v = _gather(v_cache, tables[:active], start, end)
        scores = _products(grouped[rows], k, q.dtype)
        if end > first[active - 1] + 1:
            _mask_future(scores, first[:active], num_rows, num_heads // kv_heads, start)
            v = _without_unwritten(v, first[:active], num_rows, start)
        # A whole number: exp2 of their differences is exact, in vector code and in the scalar code
        # that torch uses for the last elements of a tensor, whose other results differ.
        new_maximum = torch.maximum(maximum[rows], scores.amax(-1, keepdim=True).ceil_())
        probs = _exp2_in_vectors(scores.sub_(new_maximum))
        decay = torch.exp2(maximum[rows] - new_maximum)
        total[rows] = total[rows] * decay + probs.sum(-1, keepdim=True)
        out[rows] = out[rows] * decay + _products(probs, v.transpose(1, 2), q.dtype)
        maximum[rows] = new_maximum
    return _ungroup_heads(out / total, num_rows, num_heads, num_seqs).to(q.dtype)


def _group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """[seqs, rows, heads, dim] -> fp32 [seqs * kv_heads, max(rows * group, _MIN_ROWS), dim]."""
    num_seqs, num_rows, num_heads, head_dim = q.shape
    group = num_heads // kv_heads
    grouped = q.view(num_seqs, num_rows, kv_heads, group, head_dim).transpose(1, 2)
    grouped = grouped.reshape(num_seqs * kv_heads, num_rows * group, head_dim).float()
    missing = _MIN_ROWS - num_rows * group
    return torch.nn.functional.pad(grouped, (0, 0, 0, missing)) if missing > 0 else grouped


def _ungroup_heads(out: Tensor, num_rows: int, num_heads: int, num_seqs: int) -> Tensor:
    """The inverse of _group_heads: [seqs, rows, heads, dim]."""
    kv_heads = out.shape[0] // num_seqs
    group = num_heads // kv_heads
    out = out[:, : num_rows * group].view(num_seqs, kv_heads, num_rows, group, -1)
    return out.transpose(1, 2).reshape(num_seqs, num_rows, num_heads, -1)


def _gather(cache: Tensor, tables: Sequence[BlockTable], start: int, end: int) -> Tensor:
    """One key tile of each sequence, fp32 [seqs * kv_heads, end - start, head_dim]."""
    block_size, kv_heads, head_dim = cache.shape[1:]
    blocks = slice(start // block_size, -(-end // block_size))
    if len(tables) == 1 and tables[0].is_contiguous:
        first = tables[0].first
        tile = cache[first + blocks.start : first + blocks.stop]
    else:
        tile = cache[torch.cat([t.ids[blocks] for t in tables])]
    # [seqs, tokens, kv_heads, dim] -> [seqs, kv_heads, tokens, dim]
    tile = tile.reshape(len(tables), -1, kv_heads, head_dim)[:, start % block_size :]
    tile = tile[:, : end - start].transpose(1, 2)
    # Contiguous: oneDNN falls back to a reference loop for a strided weight, 1,000 times slower.
    tile = tile.to(torch.float32, memory_format=torch.contiguous_format).contiguous()
    return tile.view(-1, end - start, head_dim)


def _mask_future(
    scores: Tensor, first: Sequence[int], num_rows: int, group: int, start: int
) -> None:
    """Set the scores of keys after each row's own position to -inf; padded rows see key 0."""
    width = scores.shape[-1]
    device = scores.device
    row_positions = torch.arange(num_rows, device=device).repeat_interleave(group)
    last_key = to_device(first, device).unsqueeze(1) + row_positions
    padded = scores.shape[1] - num_rows * group
    last_key = torch.nn.functional.pad(last_key, (0, padded), value=start + width)
    keys = torch.arange(start, start + width, device=device)
    hidden = keys > last_key.unsqueeze(-1)  # [seqs, rows, keys]
    per_head = scores.view(len(first), -1, *scores.shape[1:])
    per_head.masked_fill_(hidden.unsqueeze(1), -math.inf)


def _exp2_in_vectors(x: Tensor) -> Tensor:
    """x.exp2_() without the scalar code that torch uses at the end of each thread's share.

    x: contiguous, its size a multiple of _VECTOR. torch gives each thread an equal share of at
    least _GRAIN elements; the pieces here are cut so that every share is whole vectors.
    """
    rest = x.view(-1)
    for step in (torch.get_num_threads() * _GRAIN, _GRAIN, _VECTOR):
        count = rest.numel() // step * step
        rest[:count].exp2_()
        rest = rest[count:]
    return x


def _without_unwritten(v: Tensor, first: Sequence[int], num_rows: int, start: int) -> Tensor:
    """V with zeros where a sequence has no tokens yet: what others left there may be NaN."""
    width = v.shape[1]
    ends = to_device(first, v.device) + (num_rows - start)
    is_unwritten = torch.arange(width, device=v.device) >= ends.unsqueeze(1)  # [seqs, keys]
    per_head = is_unwritten.repeat_interleave(v.shape[0] // len(first), dim=0)
    return v.masked_fill(per_head.unsqueeze(-1), 0.0)


def _products(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b.transpose(1, 2), fp32, each row of `a` with the same bits whatever rows are beside it.

    a: [batch, rows, inner], b: [batch, columns, inner], fp32. For bf16 the product rounds its
    operands to bf16 and sums in fp32; only the probabilities lose anything by that.
    """
    if a.device.type != "cpu":
        return torch.bmm(a, b.transpose(1, 2))
    if dtype == torch.bfloat16:
        with _bf16_operands():
            return torch.bmm(a, b.transpose(1, 2))
    # torch's own fp32 product (MKL) rounds differently with the number of rows; oneDNN's does not
    linear = torch.ops.mkldnn._linear_pointwise
    return torch.stack([linear(x, w, None, "none", [], "") for x, w in zip(a, b, strict=True)])


@contextlib.contextmanager
def _bf16_operands() -> Iterator[None]:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
