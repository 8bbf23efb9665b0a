"""A row's bits depend on that row alone: not on rows beside it, nor on how threads share them.

Few rows share the panels of a product, many are dealt out in blocks: both give the same bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowprefill.programs.model_spec import ModelSpec
from tests.unit.native.decoders import (
    Decoder,
    join,
    make_decoder,
    make_spec,
    make_weights,
    random_hidden,
)

SPECS = {
    "grouped": make_spec(96, 7, 1, 64, 208, 49),
    "biased": make_spec(112, 4, 2, 48, 96, 129, qkv_bias=True, qk_norm=True),
}
NUM_ROWS = 150
PARTS = ((0, 1), (1, 2), (3, 9), (10, 33), (33, 34), (60, 150))
"""Rows start..end of a call: few and odd ones, and enough for three threads to work alone."""
NUM_THREADS = (1, 2, 3)


@pytest.fixture(params=SPECS)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SPECS[request.param]


@pytest.fixture(params=(torch.float32, torch.bfloat16), ids=("float32", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def alone(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """On one thread: what the others are held to."""
    return make_decoder("native", spec, dtype, num_threads=1)


@pytest.fixture(params=NUM_THREADS)
def decoder(request: pytest.FixtureRequest, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    return make_decoder("native", spec, dtype, num_threads=request.param, num_sequences=6)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def prefill(decoder: Decoder, num_tokens: int, sequence: int = 0) -> Tensor:
    """K and V of random rows; returns their queries."""
    hidden = random_hidden(decoder.spec, num_tokens, decoder.dtype, seed=num_tokens)
    return decoder.qkv(hidden, decoder.rows(sequence, 0, num_tokens))


def test_qkv(alone: Decoder, decoder: Decoder) -> None:
    hidden = random_hidden(decoder.spec, NUM_ROWS, decoder.dtype)
    q = alone.qkv(hidden, alone.rows(0, 0, NUM_ROWS))
    kv = alone.kv(0, 0, NUM_ROWS)
    for start, end in ((0, NUM_ROWS), *PARTS):
        decoder.fill_cache(float("nan"))
        part = decoder.qkv(hidden[start:end], decoder.rows(0, start, end))
        assert same_bits(part, q[start:end]), (start, end)
        assert same_bits(decoder.kv(0, start, end), kv[:, start:end]), (start, end)


@pytest.mark.parametrize("cut", [1, 7, 32, 63, 64, 65])
def test_qkv_in_parts_leaves_the_cache_of_the_whole(
    alone: Decoder, decoder: Decoder, cut: int
) -> None:
    """Neighbouring tokens share words of the cache, and a part may end between them."""
    hidden = random_hidden(decoder.spec, NUM_ROWS, decoder.dtype)
    alone.qkv(hidden, alone.rows(0, 0, NUM_ROWS))
    for start in range(0, NUM_ROWS, cut):
        end = min(start + cut, NUM_ROWS)
        decoder.qkv(hidden[start:end], decoder.rows(0, start, end))
    ours, expected = decoder.kv(0, 0, NUM_ROWS), alone.kv(0, 0, NUM_ROWS)
    assert same_bits(ours, expected)


def test_qkv_of_packed_prompts(alone: Decoder, decoder: Decoder) -> None:
    lengths = (1, 31, 2, 65, 1)
    hidden = random_hidden(decoder.spec, sum(lengths), decoder.dtype)
    rows = join([decoder.rows(i, 0, n) for i, n in enumerate(lengths)])
    q = decoder.qkv(hidden, rows)
    start = 0
    for i, length in enumerate(lengths):
        end = start + length
        expected = alone.qkv(hidden[start:end], alone.rows(0, 0, length))
        assert same_bits(q[start:end], expected), length
        assert same_bits(decoder.kv(i, 0, length), alone.kv(0, 0, length)), length
        start = end


def test_qkv_of_a_row_of_each_sequence(alone: Decoder, decoder: Decoder) -> None:
    """As a decode step runs it: neighbours in the call are no neighbours in the cache."""
    contexts = (1, 15, 2, 64, 63, 7)
    for i, context in enumerate(contexts):
        prefill(decoder, context, i)
    hidden = random_hidden(decoder.spec, len(contexts), decoder.dtype)
    rows = join([decoder.rows(i, n, n + 1) for i, n in enumerate(contexts)])
    q = decoder.qkv(hidden, rows)
    for i, context in enumerate(contexts):
        alone.fill_cache(float("nan"))
        prefill(alone, context)
        expected = alone.qkv(hidden[i : i + 1], alone.rows(0, context, context + 1))
        assert same_bits(q[i : i + 1], expected), context
        kv = alone.kv(0, 0, context + 1)
        assert same_bits(decoder.kv(i, 0, context + 1), kv), context


@pytest.mark.parametrize("context", [150, 515, 700])
def test_attention(alone: Decoder, decoder: Decoder, context: int) -> None:
    first = context - NUM_ROWS
    q = prefill(alone, context)[first:]
    prefill(decoder, context)
    whole = alone.attention(q, alone.attended([0], [first]))
    for start, end in ((0, NUM_ROWS), *PARTS):
        part = decoder.attention(q[start:end], decoder.attended([0], [first + start]))
        assert same_bits(part, whole[start:end]), (start, end)


def test_attention_of_several_sequences(alone: Decoder, decoder: Decoder) -> None:
    contexts, num_rows = (5, 600, 70), 5
    queries = [prefill(decoder, n, i)[-num_rows:] for i, n in enumerate(contexts)]
    first = [n - num_rows for n in contexts]
    together = decoder.attention(torch.cat(queries), decoder.attended(range(3), first))
    for i, context in enumerate(contexts):
        prefill(alone, context)
        expected = alone.attention(queries[i], alone.attended([0], [first[i]]))
        assert same_bits(together[i * num_rows : (i + 1) * num_rows], expected), context


def test_mlp(alone: Decoder, decoder: Decoder) -> None:
    hidden = random_hidden(decoder.spec, NUM_ROWS, decoder.dtype)
    attended = torch.randn(NUM_ROWS, decoder.spec.q_size).to(decoder.dtype)
    whole = alone.mlp(hidden, attended)
    for start, end in ((0, NUM_ROWS), *PARTS):
        part = decoder.mlp(hidden[start:end], attended[start:end])
        assert same_bits(part, whole[start:end]), (start, end)


def test_logits(alone: Decoder, decoder: Decoder) -> None:
    hidden = random_hidden(decoder.spec, NUM_ROWS, decoder.dtype)
    whole = alone.operators.logits(hidden)
    for start, end in ((0, NUM_ROWS), *PARTS):
        part = decoder.operators.logits(hidden[start:end])
        assert same_bits(part, whole[start:end]), (start, end)


def test_a_layer_is_qkv_then_attention_then_mlp(alone: Decoder, decoder: Decoder) -> None:
    contexts = (0, 1, 14, 63, 300, 64)
    hidden = random_hidden(decoder.spec, len(contexts), decoder.dtype)
    rows = [decoder.rows(i, n, n + 1) for i, n in enumerate(contexts)]
    for i, context in enumerate(contexts):
        if context:
            prefill(decoder, context, i)
    together = decoder.layer(hidden, join(rows), decoder.attended(range(6), contexts))
    kv = [decoder.kv(i, n, n + 1) for i, n in enumerate(contexts)]
    for i, context in enumerate(contexts):
        alone.fill_cache(float("nan"))
        if context:
            prefill(alone, context)
        row, x = alone.rows(0, context, context + 1), hidden[i : i + 1]
        attended = alone.attended([0], [context])
        in_steps = alone.mlp(x, alone.attention(alone.qkv(x, row), attended))
        assert same_bits(together[i : i + 1], in_steps), context
        assert same_bits(kv[i], alone.kv(0, context, context + 1)), context


@pytest.mark.parametrize("num_sequences", [1, 17, 40])
def test_threads_change_no_bit_of_a_layer(
    spec: ModelSpec, dtype: torch.dtype, num_sequences: int
) -> None:
    """16 threads are more than there are cores on many machines."""
    contexts = [(17 * i + 3) % 100 for i in range(num_sequences)]
    hidden = random_hidden(spec, num_sequences, dtype)
    results = []
    for num_threads in (1, 2, 3, 16):
        decoder = make_decoder(
            "native",
            spec,
            dtype,
            num_threads=num_threads,
            num_sequences=num_sequences,
            max_len=112,
        )
        for i, context in enumerate(contexts):
            if context:
                prefill(decoder, context, i)
        rows = join([decoder.rows(i, n, n + 1) for i, n in enumerate(contexts)])
        attended = decoder.attended(range(num_sequences), contexts)
        results.append(decoder.layer(hidden, rows, attended))
    assert all(same_bits(result, results[0]) for result in results[1:])


def test_what_nobody_has_written_does_not_show(decoder: Decoder) -> None:
    """Every context that ends within a key tile, over a cache of NaN and one of zeros."""
    rows = random_hidden(decoder.spec, 66, decoder.dtype)
    results = []
    for unwritten in (float("nan"), 0.0):
        for context in range(1, 67):
            decoder.fill_cache(unwritten)
            q = decoder.qkv(rows[:context], decoder.rows(0, 0, context))
            few = decoder.attention(q[-1:], decoder.attended([0], [context - 1]))
            results.append(torch.cat([few, decoder.attention(q, decoder.attended([0], [0]))]))
    over_nan, over_zeros = results[:66], results[66:]
    assert all(r.isfinite().all() for r in over_nan)
    assert all(same_bits(a, b) for a, b in zip(over_nan, over_zeros, strict=True))


@pytest.mark.parametrize("num_rows", [6, NUM_ROWS])
def test_a_row_of_nan_stays_alone(decoder: Decoder, num_rows: int) -> None:
    """One broken request harms nobody else, and does not look sound."""
    hidden = random_hidden(decoder.spec, num_rows, decoder.dtype)
    broken = hidden.clone()
    broken[3] = float("nan")
    rows = decoder.rows(0, 0, num_rows)
    others = [i for i in range(num_rows) if i != 3]
    attended = decoder.qkv(hidden, rows)
    operators = (
        lambda x: decoder.qkv(x, rows),
        lambda x: decoder.mlp(x, attended),
        decoder.operators.logits,
    )
    for operator in operators:
        expected, result = operator(hidden), operator(broken)
        assert same_bits(result[others], expected[others])
        assert result[3].isnan().all()


def test_closing_ends_its_threads(spec: ModelSpec) -> None:
    def threads() -> set[str]:
        return {path.name for path in Path("/proc/self/task").iterdir()}

    make_weights(spec, torch.float32)  # torch may start threads of its own
    before = threads()
    decoder = make_decoder("native", spec, torch.float32, num_threads=4)
    prefill(decoder, 100)
    started = threads() - before
    assert len(started) >= 3
    del decoder
    assert len(started & threads()) <= len(started) - 3
