"""Choosing a token of each row of logits where they are. Reference: executor/sampler.py.

A program chooses for one row, from that row alone. top_k and top_p keep what lies above a
threshold: it is searched for, with a pass over the row for each bit, so nothing is sorted. Sums are
fp32, in an order of their own, where the reference's are fp64: a number drawn next to a token's
edge may give its neighbour.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped,import-not-found"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Columns that are looked at together."""
NUM_WARPS = 16
LOWEST = tl.constexpr(-0x7F800001)
"""Key of minus infinity."""


@triton.jit
def _keys(x):
    """An int32 for each number, in the same order; equal for 0 and -0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _number(key):
    """The inverse of _keys."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(x, peak, temperature):
    return tl.exp((x - peak) / temperature)


@triton.jit
def _of_at_least(row_ptr, vocab, low, peak, temperature, BLOCK: tl.constexpr):
    """How many columns have a key of at least `low`, and their weight."""
    count = tl.zeros([BLOCK], tl.int32)
    weight = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        inside = (columns < vocab) & (_keys(x) >= low)
        count += inside.to(tl.int32)
        weight += tl.where(inside, _weights(x, peak, temperature), 0.0)
    return tl.sum(count, axis=0), tl.sum(weight, axis=0)


@triton.jit
def _between(low, high):
    """The middle, rounded up, without overflow."""
    return (low | high) - ((low ^ high) >> 1)


@triton.jit
def _search(row_ptr, vocab, low, count_min, weight_min, peak, temperature, BLOCK: tl.constexpr):
    """The largest key, `low` or above, that at least so many columns of so much weight reach; and
    how many columns lie above it, and their weight."""
    high = _keys(peak)
    while low < high:
        middle = _between(low, high)
        count, weight = _of_at_least(row_ptr, vocab, middle, peak, temperature, BLOCK)
        if (count >= count_min) & (weight >= weight_min):
            low = middle
        else:
            high = middle - 1
    count, weight = _of_at_least(row_ptr, vocab, low + 1, peak, temperature, BLOCK)
    return low, count, weight


@triton.jit
def _threshold(row_ptr, vocab, peak, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """Key of the smallest logit that top_k and top_p keep, and how many of those equal to it."""
    low = tl.full([], LOWEST, tl.int32)
    num_equal = vocab
    count, weight = _of_at_least(row_ptr, vocab, low + 1, peak, temperature, BLOCK)
    total = weight
    if (top_k > 0) & (top_k < vocab):
        low, count, weight = _search(row_ptr, vocab, low, top_k, 0.0, peak, temperature, BLOCK)
        num_equal = top_k - count
        total = weight + num_equal * _weights(_number(low), peak, temperature)
    if top_p < 1.0:
        wanted = top_p * total
        kept = low
        low, count, weight = _search(row_ptr, vocab, low, 0, wanted, peak, temperature, BLOCK)
        each = _weights(_number(low), peak, temperature)
        if each > 0.0:
            # the smaller one: rounding must not keep more than top_k
            num_needed = tl.maximum(tl.ceil((wanted - weight) / each), 1.0).to(tl.int32)
            num_equal = tl.where(low == kept, tl.minimum(num_equal, num_needed), num_needed)
    return low, num_equal


@triton.jit
def _walk(row_ptr, vocab, peak, temperature, low, num_equal, min_p, wanted, BLOCK: tl.constexpr):
    """Along the kept columns: their weight, the first by which it is above `wanted` (vocab if none
    is), the last that has a weight."""
    weight = 0.0
    num_seen = 0
    found = vocab
    last = 0
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        keys = _keys(x)
        equal = ((columns < vocab) & (keys == low)).to(tl.int32)
        is_first = num_seen + tl.cumsum(equal, axis=0) <= num_equal
        kept = (columns < vocab) & ((keys > low) | ((equal > 0) & is_first))
        each = tl.where(kept, _weights(x, peak, temperature), 0.0)
        each = tl.where(each >= min_p, each, 0.0)
        is_found = (each > 0.0) & (weight + tl.cumsum(each, axis=0) > wanted)
        found = tl.minimum(found, tl.min(tl.where(is_found, columns, vocab), axis=0))
        last = tl.maximum(last, tl.max(tl.where(each > 0.0, columns, 0), axis=0))
        num_seen += tl.sum(equal, axis=0)
        weight += tl.sum(each, axis=0)
    return weight, found, last


@triton.jit
def choose_kernel(logits_ptr, draws_ptr, choices_ptr, vocab, BLOCK: tl.constexpr):
    """One row. Grid: (num_rows,)."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * vocab
    draw_ptr = draws_ptr + row * 5
    temperature = tl.load(draw_ptr)
    peaks = tl.full([BLOCK], float("-inf"), tl.float32)
    first = tl.zeros([BLOCK], tl.int32)
    num_bad = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < vocab
        x = tl.load(row_ptr + columns, mask=inside, other=float("-inf"))
        num_bad += (inside & ~(tl.abs(x) < float("inf"))).to(tl.int32)
        first = tl.where(x > peaks, columns, first)
        peaks = tl.where(x > peaks, x, peaks)
    peak = tl.max(peaks, axis=0)
    token = tl.min(tl.where(peaks == peak, first, vocab), axis=0)
    is_finite = tl.sum(num_bad, axis=0) == 0
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        total += tl.exp(x - peak)
    if (temperature > 0.0) & is_finite:
        top_k = tl.load(draw_ptr + 1).to(tl.int32)
        top_p = tl.load(draw_ptr + 2)
        min_p = tl.load(draw_ptr + 3)
        low, num_equal = _threshold(row_ptr, vocab, peak, temperature, top_k, top_p, BLOCK)
        kept = _walk(row_ptr, vocab, peak, temperature, low, num_equal, min_p, peak, BLOCK)
        wanted = tl.load(draw_ptr + 4) * kept[0]
        found = _walk(row_ptr, vocab, peak, temperature, low, num_equal, min_p, wanted, BLOCK)
        # the last: rounding up to the whole weight must not run past it
        token = tl.minimum(found[1], found[2])
    token = tl.minimum(token, vocab - 1)
    logprob = tl.load(row_ptr + token) - peak - tl.log(tl.sum(total, axis=0))
    tl.store(choices_ptr + row * 3, token.to(tl.float32))
    tl.store(choices_ptr + row * 3 + 1, logprob)
    tl.store(choices_ptr + row * 3 + 2, is_finite.to(tl.float32))


def choose(logits: Tensor, draws: Tensor) -> Tensor:
    """A token of each row.

    logits: [num_rows, vocab] fp32, contiguous; vocab < 2**24
    draws:  [num_rows, 5] fp32: temperature (0 = the largest logit, of equal ones the first), top_k
            (0 = all), top_p, min_p, and a number in [0, 1]: where in the distribution that those
            leave
    Returns [num_rows, 3] fp32: token id, its log-softmax among all logits, and 1 if all logits of
    the row are finite; else the row's token means nothing.
    """
    num_rows, vocab = logits.shape
    assert logits.is_contiguous() and draws.is_contiguous() and draws.shape == (num_rows, 5)
    assert vocab < 1 << 24, f"{vocab} token ids do not fit into fp32"
    out = logits.new_empty(num_rows, 3)
    if num_rows:
        choose_kernel[(num_rows,)](logits, draws, out, vocab, BLOCK, num_warps=NUM_WARPS)
    return out
