"""Features: the numbers that the seconds of a slice are linear in. Pure: no torch.

Matrix products: a constant, the rows, and the rows beyond a few knots. Their coefficients are not
negative, so this is a rising curve that bends upwards: flat while the weights' reading dominates,
steeper once the arithmetic does.

Attention runs over whole key tiles (slices.KeyTiles), so it costs what the tiles hold: for each
key the gathering, for each row and key the products; and both once more, a little, in the tiles
that are masked because not every row may look at all of their keys.
"""

from __future__ import annotations

from dataclasses import replace

from flowprefill.programs.slices import Group, KeyTiles, Slice

_ROW_KNOTS = (0, 16, 64, 256, 1024)
_PRODUCT_NAMES = ("", "row", *(f"row > {knot}" for knot in _ROW_KNOTS[1:]))

FEATURE_NAMES: dict[str, tuple[str, ...]] = {
    "qkv": _PRODUCT_NAMES,
    "attention": ("", "row", "key", "masked key", "row x key", "row x masked key"),
    "mlp": _PRODUCT_NAMES,
    "layers": (*_PRODUCT_NAMES, "key"),  # each times the layers
    "head": ("", "key"),
    "decode_attention": ("", "row", "key of a row", "key"),
    "logits": _PRODUCT_NAMES,
}
"""What each feature counts, by slice kind; the first is the constant."""


def slice_kind(piece: Slice) -> str:
    """Slices of one kind share coefficients."""
    if piece.group is Group.ATTENTION and piece.sequence is None:
        return "decode_attention"
    return piece.group.value


def slice_features(piece: Slice, tiles: KeyTiles) -> tuple[float, ...]:
    """Numbers in the order of FEATURE_NAMES. tiles: how attention cuts the keys."""
    rows = piece.num_rows
    if piece.group is Group.HEAD:
        return 1.0, float(piece.num_keys)
    if piece.group is Group.LAYERS:
        keys = float(rows * tiles.end(piece.num_keys // max(rows, 1)))
        return tuple(piece.num_layers * f for f in (*_product_features(rows), keys))
    if piece.group is not Group.ATTENTION:
        return _product_features(rows)
    if piece.sequence is None:
        keys = tiles.end(piece.num_keys // max(rows, 1))
        return 1.0, float(rows), float(keys), float(rows * keys)
    keys = tiles.end(piece.num_keys)
    masked = keys - tiles.start(piece.position)
    return 1.0, float(rows), float(keys), float(masked), float(rows * keys), float(rows * masked)


def without_context(piece: Slice) -> Slice:
    """The slice as it would be if attention read nothing."""
    return replace(piece, num_keys=0, position=0)


def _product_features(rows: int) -> tuple[float, ...]:
    return (1.0, *[float(rows - knot) if rows > knot else 0.0 for knot in _ROW_KNOTS])
