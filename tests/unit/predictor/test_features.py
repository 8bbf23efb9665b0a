"""Features of slices: what attention's cost is counted in, and that they follow its key tiles."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

import flowprefill.native
from flowprefill.ops.attention import key_tiles
from flowprefill.predictor.features import (
    FEATURE_NAMES,
    slice_features,
    slice_kind,
    without_context,
)
from flowprefill.programs.slices import NATIVE_KEY_TILES, TORCH_KEY_TILES, Group, Slice
from tests.unit.predictor.shapes import all_shapes

SOURCES = Path(flowprefill.native.__file__).parent / "src"


def test_key_tiles_are_those_of_attention() -> None:
    tiles = list(key_tiles(5000))
    for start, end in tiles:
        assert {TORCH_KEY_TILES.start(p) for p in (start, end - 1)} == {start}
        assert {TORCH_KEY_TILES.end(n) for n in (start + 1, end)} == {end}
    assert TORCH_KEY_TILES.end(0) == 0


def test_native_key_tiles_are_those_of_the_sources() -> None:
    (width,) = re.findall(r"constexpr int KEY_TILE = (\d+);", (SOURCES / "attention.h").read_text())
    assert int(width) == NATIVE_KEY_TILES.width
    assert [NATIVE_KEY_TILES.end(n) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert [NATIVE_KEY_TILES.start(p) for p in (0, 63, 64)] == [0, 0, 64]


def test_every_slice_has_the_features_of_its_kind() -> None:
    kinds = set()
    for piece in all_shapes():
        kind = slice_kind(piece)
        features = slice_features(piece, TORCH_KEY_TILES)
        assert len(features) == len(FEATURE_NAMES[kind])
        assert all(value >= 0 for value in features), piece
        kinds.add(kind)
    assert kinds == set(FEATURE_NAMES)


@pytest.mark.parametrize(
    ("position", "num_keys", "keys", "masked"),
    [
        (0, 100, 128, 128),
        (130, 200, 512, 384),
        (700, 800, 1024, 512),
        (100, 200, 512, 512),  # over the edge at 128: both tiles are masked
        (2000, 2048, 2048, 1024),
    ],
)
def test_prefill_attention_costs_what_its_key_tiles_hold(
    position: int, num_keys: int, keys: int, masked: int
) -> None:
    rows = num_keys - position
    piece = Slice(Group.ATTENTION, 0, rows, sequence=0, position=position, num_keys=num_keys)
    features = slice_features(piece, TORCH_KEY_TILES)
    assert features == (1, rows, keys, masked, rows * keys, rows * masked)


def test_decode_attention_reads_the_mean_context_of_its_sequences() -> None:
    piece = Slice(Group.ATTENTION, 0, 3, num_keys=900)
    assert slice_features(piece, TORCH_KEY_TILES) == (1, 3, 512, 3 * 512)
    assert slice_features(piece, NATIVE_KEY_TILES) == (1, 3, 320, 3 * 320)


def test_a_whole_decode_layer_costs_its_rows_and_their_keys() -> None:
    rows = slice_features(Slice(Group.MLP, 0, 3), NATIVE_KEY_TILES)
    layer = slice_features(Slice(Group.LAYERS, 0, 3, num_keys=900), NATIVE_KEY_TILES)
    assert layer == (*rows, 3 * 320)


def test_products_of_more_rows_never_count_less() -> None:
    features = [slice_features(Slice(Group.MLP, 0, n), TORCH_KEY_TILES) for n in range(1, 3000, 7)]
    for fewer, more in itertools.pairwise(features):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_without_context_attention_reads_nothing() -> None:
    piece = Slice(Group.ATTENTION, 0, 9, sequence=0, position=4000, num_keys=4009)
    assert slice_features(without_context(piece), TORCH_KEY_TILES) == (1, 9, 0, 0, 0, 0)
