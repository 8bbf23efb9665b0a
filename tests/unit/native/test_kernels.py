"""Each native operator against formulas in fp64, over shapes that leave remainders everywhere.

In fp32 by a fixed tolerance; in bf16 the error must not be larger than that of torch's operators on
the same inputs. Caches are full of NaN wherever nobody has written.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flowprefill.granularity import Granularity
from flowprefill.host_cpu import cpu_flags
from flowprefill.huge_pages import Arena
from flowprefill.native import library
from flowprefill.native.library import AVX2, Instructions, instructions_of, load_library
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.native_operators import pack
from flowprefill.programs.program import SequenceInput
from flowprefill.programs.slices import NATIVE_KEY_TILES, SliceLimits
from tests.native_kernels import require_native
from tests.unit.native.decoders import (
    LAYER,
    Decoder,
    join,
    make_decoder,
    make_spec,
    make_weights,
    random_hidden,
)
from tests.unit.native.reference import Reference
from tests.unit.programs.runs import random_tokens, run_to_end

SHAPES = {
    "smollm2": make_spec(576, 9, 3, 64, 1536, 1003),
    "seven_heads_share_one": make_spec(896, 14, 2, 64, 304, 129, qkv_bias=True),
    "wide": make_spec(4096, 2, 1, 256, 48, 33),
    "odd_panels": make_spec(48, 7, 1, 16, 80, 49),
    "half_heads_of_40": make_spec(112, 4, 4, 80, 16, 35, qk_norm=True),
    "heads_of_128": make_spec(256, 4, 2, 128, 432, 64, qk_norm=True),
    "heads_of_48": make_spec(80, 3, 3, 48, 208, 47, qkv_bias=True),
}
NUM_ROWS = 70
"""Blocks of rows on two threads, with a remainder; other numbers give the same bits."""
CONTEXTS = (1, 2, 15, 16, 17, 33, 63, 64, 65, 127, 128, 511, 512, 513, 577, 700)
"""Ends within and at the edges of words, groups of 16 tokens, key tiles and chunks."""
FP32_TOLERANCE = 1e-5
"""Largest error, in units of the typical result."""
NO_WORSE = 1.1
"""Error of native bf16 over that of torch's."""


@pytest.fixture(params=SHAPES)
def spec(request: pytest.FixtureRequest) -> ModelSpec:
    return SHAPES[request.param]


@pytest.fixture(params=("float32", "float32 with AVX2", "bfloat16"))
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    name, _, narrow = request.param.partition(" with ")
    require_native(name)
    if narrow and instructions_of(cpu_flags()) == AVX2:
        pytest.skip("all of this processor's kernels are of AVX2")
    with use_instructions(AVX2) if narrow else contextlib.nullcontext():
        yield getattr(torch, name)


@contextlib.contextmanager
def use_instructions(instructions: Instructions) -> Iterator[None]:
    """As on a processor that has no others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "cpu_flags", lambda: instructions.flags)
        load_library.cache_clear()
        yield
    load_library.cache_clear()


@pytest.fixture
def native(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    return make_decoder("native", spec, dtype)


@pytest.fixture
def other(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    return make_decoder("torch", spec, dtype)


@pytest.fixture
def reference(spec: ModelSpec, dtype: torch.dtype) -> Reference:
    return Reference(spec, make_weights(spec, dtype))


def error(result: Tensor, expected: Tensor) -> float:
    """Root mean square of the differences, in units of the root mean square of what is expected."""
    difference = result.double() - expected.view_as(result)
    return float(difference.square().mean().sqrt() / expected.square().mean().sqrt())


def check(result: Tensor, others: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """result: of the native kernels; others: of torch; expected: fp64; dtype: of the weights."""
    assert result.isfinite().all()
    if dtype == torch.float32:
        largest = (result.double() - expected.view_as(result)).abs().max()
        assert largest <= FP32_TOLERANCE * expected.square().mean().sqrt()
    else:
        assert error(result, expected) <= NO_WORSE * error(others, expected)


def torch_attention(spec: ModelSpec, q: Tensor, k: Tensor, v: Tensor, first: int) -> Tensor:
    """torch's own attention, whose bf16 path rounds probabilities to bf16 as the kernels do."""
    group = spec.num_heads // spec.num_kv_heads
    k, v = (t.repeat_interleave(group, dim=1).transpose(0, 1)[None] for t in (k, v))
    heads = q.view(len(q), spec.num_heads, spec.head_dim).transpose(0, 1)[None]
    is_seen = torch.arange(k.shape[2]) <= first + torch.arange(len(q)).unsqueeze(1)
    out = scaled_dot_product_attention(heads, k, v, attn_mask=is_seen, scale=math.log(2))
    return out[0].transpose(0, 1).reshape(len(q), -1)


def test_qkv(native: Decoder, other: Decoder, reference: Reference) -> None:
    hidden = random_hidden(native.spec, NUM_ROWS, native.dtype)
    start = 37
    q, k, v = reference.qkv(LAYER, hidden, start)
    results = []
    for decoder in (native, other):
        queries = decoder.qkv(hidden, decoder.rows(0, start, start + NUM_ROWS))
        results.append((queries, *decoder.kv(0, start, start + NUM_ROWS)))
    for ours, theirs, expected in zip(*results, (q, k, v), strict=True):
        check(ours, theirs, expected, native.dtype)


@pytest.mark.parametrize("num_rows", [1, 40])
def test_attention(native: Decoder, reference: Reference, num_rows: int) -> None:
    """Of the last rows of a sequence, on contexts that end anywhere."""
    spec = native.spec
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for context in CONTEXTS:
        first = max(0, context - num_rows)
        native.fill_cache(float("nan"))
        hidden = random_hidden(spec, context, native.dtype, seed=context)
        q = native.qkv(hidden, native.rows(0, 0, context))[first:]
        k, v = native.kv(0, 0, context)
        ours = native.attention(q, native.attended([0], [first]))
        results.append(
            (
                ours,
                torch_attention(spec, q, k, v, first),
                reference.attention(q, k, v, first),
            )
        )
        # of its own: an error in one context must not hide behind the others
        assert error(ours, results[-1][2]) <= (1e-2 if native.dtype == torch.bfloat16 else 1e-5)
    check(*map(torch.cat, zip(*results, strict=True)), native.dtype)


def test_mlp(native: Decoder, other: Decoder, reference: Reference) -> None:
    spec = native.spec
    hidden = random_hidden(spec, NUM_ROWS, native.dtype)
    attended = torch.randn(NUM_ROWS, spec.q_size).to(native.dtype)
    results = [decoder.mlp(hidden, attended) for decoder in (native, other)]
    check(results[0], results[1], reference.mlp(LAYER, hidden, attended), native.dtype)


def test_mlp_of_gates_far_from_zero(dtype: torch.dtype) -> None:
    """Where e^-x leaves the range of fp32, and silu is 0 or x."""
    spec = SHAPES["odd_panels"]
    weights = make_weights(spec, dtype)
    layers = [replace(layer, post_norm=100 * layer.post_norm) for layer in weights.layers]
    weights = replace(weights, layers=layers)
    hidden = random_hidden(spec, NUM_ROWS, dtype)
    attended = torch.randn(NUM_ROWS, spec.q_size).to(dtype)
    ours, theirs = (
        make_decoder(kernels, spec, dtype, weights=weights).mlp(hidden, attended)
        for kernels in ("native", "torch")
    )
    check(ours, theirs, Reference(spec, weights).mlp(LAYER, hidden, attended), dtype)


@pytest.mark.parametrize("gate", [-1e4, -200.0, -100.0, -50.0, -20.0, -5.0, 0.0, 5.0, 100.0, 1e4])
def test_silu_of_one_gate(gate: float) -> None:
    """A model of which one gate, one up and one down row are all that there is."""
    spec = make_spec(32, 1, 1, 16, 16, 32)
    weights = make_weights(spec, torch.float32)
    layers = []
    for layer in weights.layers:
        o_proj, gate_up = torch.zeros_like(layer.o_proj), torch.zeros_like(layer.gate_up)
        down = torch.zeros_like(layer.down)
        gate_up[0, 0], gate_up[spec.intermediate_size, 0], down[1, 0] = gate, 1.0, 1.0
        layers.append(replace(layer, o_proj=o_proj, gate_up=gate_up, down=down))
    weights = replace(weights, layers=layers)
    decoder = make_decoder("native", spec, torch.float32, weights=weights)
    hidden = torch.ones(1, spec.hidden_size)
    attended = torch.zeros(1, spec.q_size)
    ours = decoder.mlp(hidden, attended)[0, 1] - hidden[0, 1]
    theirs = Reference(spec, weights).mlp(LAYER, hidden, attended)[0, 1] - hidden[0, 1]
    assert abs(ours - theirs) <= 1e-6 * (1 + abs(theirs))


def test_logits(native: Decoder, other: Decoder, reference: Reference) -> None:
    hidden = random_hidden(native.spec, 13, native.dtype)
    results = [decoder.operators.logits(hidden) for decoder in (native, other)]
    assert results[0].dtype == torch.float32
    check(results[0], results[1], reference.logits(hidden), native.dtype)


@pytest.mark.parametrize(
    ("lengths", "block_size"), [((1,), 16), ((300,), 48), ((5, 1, 130, 64), 16)], ids=str
)
def test_whole_prompts(
    spec: ModelSpec, dtype: torch.dtype, lengths: tuple[int, ...], block_size: int
) -> None:
    """All operators together, alone and packed: logits of each prompt's last token."""
    prompts = [random_tokens(n, spec.vocab_size, seed=n) for n in lengths]
    results = []
    for kernels in ("native", "torch"):
        decoder = make_decoder(
            kernels, spec, dtype, block_size=block_size, num_sequences=len(prompts), max_len=336
        )
        limits = SliceLimits(64, 64 * 128, key_tiles=NATIVE_KEY_TILES)
        program = DecoderProgram(spec, decoder.operators, limits)
        inputs = [SequenceInput(p, 0, decoder.tables[i]) for i, p in enumerate(prompts)]
        results.append(run_to_end(program.prefill(inputs, Granularity.parse("tile"))))
    reference = Reference(spec, make_weights(spec, dtype))
    expected = torch.stack([reference.prefill(p)[-1] for p in prompts])
    check(results[0], results[1], expected, dtype)


@pytest.mark.parametrize("num_sequences", [1, 2, 7, 40])
def test_decode(dtype: torch.dtype, num_sequences: int) -> None:
    """A layer for one row of each of several sequences, on contexts of any length."""
    spec = SHAPES["smollm2"]
    contexts = random.Random(num_sequences).choices(range(200), k=num_sequences)
    results, expected = [], []
    reference = Reference(spec, make_weights(spec, dtype))
    hidden = random_hidden(spec, num_sequences, dtype)
    for kernels in ("native", "torch"):
        decoder = make_decoder(kernels, spec, dtype, num_sequences=num_sequences, max_len=208)
        for i, context in enumerate(contexts):
            prompt = random_hidden(spec, context, dtype, seed=i)
            if context:
                decoder.qkv(prompt, decoder.rows(i, 0, context))
            if kernels == "native":
                continue
            before = reference.qkv(LAYER, prompt, 0)
            q, k, v = reference.qkv(LAYER, hidden[i : i + 1], context)
            k, v = torch.cat([before[1], k]), torch.cat([before[2], v])
            attended = reference.attention(q.flatten(1), k, v, context)
            expected.append(reference.mlp(LAYER, hidden[i : i + 1], attended))
        rows = [decoder.rows(i, n, n + 1) for i, n in enumerate(contexts)]
        together = join(rows)
        attended = decoder.attended(range(num_sequences), contexts)
        results.append(decoder.layer(hidden, together, attended))
    check(results[0], results[1], torch.cat(expected), dtype)


@pytest.mark.parametrize("columns", [1, 17, 31])
def test_a_weight_of_few_columns_is_packed(columns: int) -> None:
    packed = pack(torch.ones(columns, 16), Arena(4096))
    assert packed.sum() == 16 * columns


def test_probabilities_are_as_exact_as_promised() -> None:
    """Of two keys, whose scores differ by 0.5: where the series is worst."""
    spec = make_spec(32, 1, 1, 16, 16, 32)
    weights = make_weights(spec, torch.float32)
    decoder = make_decoder("native", spec, torch.float32, weights=weights, max_len=16)
    worst = 0.0
    for below in torch.linspace(0, 1, 101):
        cache = decoder.operators.cache
        cache.k.zero_(), cache.v.zero_()
        block = decoder.tables[0].ids[0]
        cache.k[1, block, 0, 0, 1, 0] = -below  # the second key's first value
        cache.v[1, block, 0, 0, 1, 0, 0] = 1.0
        q = torch.zeros(1, 16)
        q[0, 0] = 1.0
        out = decoder.attention(q, decoder.attended([0], [1]))[0, 0]
        p = 2.0 ** -float(below)
        worst = max(worst, abs(float(out) / (p / (1 + p)) - 1))
    assert worst < 4e-7, worst
