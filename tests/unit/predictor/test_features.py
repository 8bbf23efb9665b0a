"""Features of slices: what attention's cost is counted in, and that they follow its key tiles."""

from __future__ import annotations

import itertools

import pytest

from flowprefill.ops.attention import key_tiles
from flowprefill.predictor.features import (
    FEATURE_NAMES,
    key_tile_end,
    key_tile_start,
    slice_features,
    slice_kind,
    without_context,
)
from flowprefill.programs.slices import Group, Slice
from tests.unit.predictor.shapes import all_shapes


def test_key_tiles_are_those_of_attention() -> None:
    tiles = list(key_tiles(5000))
    for start, end in tiles:
        assert {key_tile_start(p) for p in (start, end - 1)} == {start}
        assert {key_tile_end(n) for n in (start + 1, end)} == {end}
    assert key_tile_end(0) == 0


def test_every_slice_has_the_features_of_its_kind() -> None:
    kinds = set()
    for piece in all_shapes():
        kind = slice_kind(piece)
        assert len(slice_features(piece)) == len(FEATURE_NAMES[kind])
        assert all(value >= 0 for value in slice_features(piece)), piece
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
    assert slice_features(piece) == (1, rows, keys, masked, rows * keys, rows * masked)


def test_decode_attention_reads_the_mean_context_of_its_sequences() -> None:
    assert slice_features(Slice(Group.ATTENTION, 0, 3, num_keys=900)) == (1, 3, 512, 3 * 512)


def test_products_of_more_rows_never_count_less() -> None:
    features = [slice_features(Slice(Group.MLP, 0, n)) for n in range(1, 3000, 7)]
    for fewer, more in itertools.pairwise(features):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))


def test_without_context_attention_reads_nothing() -> None:
    piece = Slice(Group.ATTENTION, 0, 9, sequence=0, position=4000, num_keys=4009)
    assert slice_features(without_context(piece)) == (1, 9, 0, 0, 0, 0)
