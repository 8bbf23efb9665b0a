"""FittedPredictor: seconds of a slice as a linear function of its shape, times one speed factor.

Coefficients come from a short run at load (profile.py) by least squares. Online only the device's
speed factor moves, bounded: per-group fits would wind up without excitation. Samples are busy slice
time; queueing never enters them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from flowprefill.granularity import Granularity
from flowprefill.programs.slices import (
    Group,
    PassPlan,
    Slice,
    SliceLimits,
    Span,
    plan_decode,
    plan_prefill,
)

Floats = npt.NDArray[np.float64]

_NO_BOUNDARY = Granularity("whole")
_SPEED_WEIGHT = 0.1
_SPEED_BOUNDS = (0.25, 4.0)
_MIN_SAMPLE_S = 0.002
_NEVER_RUN = (0.0, 0.0, 0.0)
"""A model of one layer has slices of the head's layer only."""


def slice_kind(piece: Slice) -> str:
    """Slices of one kind share coefficients."""
    if piece.group is Group.ATTENTION and piece.sequence is None:
        return "decode_attention"
    return piece.group.value


def slice_features(piece: Slice) -> tuple[float, float, float]:
    """Constant, rows, and keys read: rows x keys where every row reads them (prefill attention)."""
    rows = float(piece.num_rows)
    if piece.group is Group.HEAD:
        return 1.0, 0.0, float(piece.num_keys)
    if piece.group is Group.ATTENTION and piece.sequence is not None:
        return 1.0, rows, rows * piece.num_keys
    return 1.0, rows, float(piece.num_keys)


class FittedPredictor:
    """Implements Predictor, and predicts single slices for the executor."""

    def __init__(
        self, coefficients: Mapping[str, Sequence[float]], num_layers: int, limits: SliceLimits
    ) -> None:
        """coefficients: seconds per feature, by slice_kind."""
        self._coefficients = {kind: tuple(values) for kind, values in coefficients.items()}
        self._num_layers = num_layers
        self._limits = limits
        self.speed_factor = 1.0
        """Measured over predicted busy time, a moving average."""

    def slice_s(self, piece: Slice) -> float:
        """Device seconds of one slice."""
        a, b, c = self._coefficients.get(slice_kind(piece), _NEVER_RUN)
        constant, rows, keys = slice_features(piece)
        return self.speed_factor * (a * constant + b * rows + c * keys)

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        span = Span(num_cached_tokens, num_tokens)
        return self._pass_s(plan_prefill([span], self._limits, _NO_BOUNDARY, is_final=True))

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        mean = num_context_tokens // max(num_seqs, 1)
        return self._pass_s(plan_decode([mean] * num_seqs, self._limits)) if num_seqs else 0.0

    def observe(self, busy_s: float, predicted_s: float) -> None:
        """Take in one measured stretch of slices and what slice_s had predicted for it."""
        if predicted_s < _MIN_SAMPLE_S:
            return
        low, high = _SPEED_BOUNDS
        sample = min(max(self.speed_factor * busy_s / predicted_s, low), high)
        self.speed_factor += _SPEED_WEIGHT * (sample - self.speed_factor)

    def _pass_s(self, plan: PassPlan) -> float:
        return plan.total_s(self.slice_s, self._num_layers)


def fit(samples: Iterable[tuple[Slice, float]]) -> dict[str, tuple[float, float, float]]:
    """Least squares per slice kind over (slice, measured seconds); no coefficient is negative.

    Slices that took over three times their kind's fit (another process had the core) are left out
    of a second fit.
    """
    by_kind: dict[str, list[tuple[tuple[float, float, float], float]]] = {}
    for piece, seconds in samples:
        by_kind.setdefault(slice_kind(piece), []).append((slice_features(piece), seconds))
    return {kind: _fit_kind(rows) for kind, rows in by_kind.items()}


def _fit_kind(rows: Sequence[tuple[Sequence[float], float]]) -> tuple[float, float, float]:
    features = np.array([f for f, _ in rows])
    seconds = np.array([s for _, s in rows])
    solution = _nonnegative_least_squares(features, seconds)
    usual = seconds <= 3 * np.maximum(features @ solution, np.median(seconds) / 3)
    if usual.any():
        solution = _nonnegative_least_squares(features[usual], seconds[usual])
    return float(solution[0]), float(solution[1]), float(solution[2])


def _nonnegative_least_squares(features: Floats, seconds: Floats) -> Floats:
    """Least squares of relative errors; negative coefficients are dropped one by one."""
    scale = np.abs(features).max(axis=0)
    scale[scale == 0] = 1.0
    weights = 1 / np.maximum(seconds, 1e-6)
    design = features / scale * weights[:, None]
    active = [i for i in range(features.shape[1]) if features[:, i].any()]
    while active:
        found, *_ = np.linalg.lstsq(design[:, active], seconds * weights, rcond=None)
        if (found >= 0).all():
            solution = np.zeros(features.shape[1])
            solution[active] = found / scale[active]
            return solution
        del active[int(found.argmin())]
    return np.zeros(features.shape[1])
