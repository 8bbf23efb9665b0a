"""FittedPredictor: seconds of a slice as a linear function of its features, times one speed factor.

Coefficients come from a short run at load (profiler.py) by least squares. Online only the device's
speed factor moves, bounded: per-group fits would wind up without excitation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from operator import mul

import numpy as np
import numpy.typing as npt

from flowprefill.granularity import Granularity
from flowprefill.predictor.features import slice_features, slice_kind, without_context
from flowprefill.predictor.pass_seconds import PassSeconds, RunningSum
from flowprefill.predictor.profile import Profile
from flowprefill.predictor.speed import SpeedFactor
from flowprefill.programs.slices import (
    Group,
    KeyTiles,
    Slice,
    SliceLimits,
    Span,
    max_decode_keys,
)

Floats = npt.NDArray[np.float64]
Coefficients = tuple[float, ...]

_TILE = Granularity("tile")
_SATURATED = 1.1
"""Time per token over its limit for long prompts, from which on a pass counts as saturated."""
_SATURATION_STEP = 64
_MAX_SATURATION_TOKENS = 1 << 16
_MAX_KNOWN_SLICES = 1 << 12


class FittedPredictor:
    """Implements Predictor, and predicts single slices for the executor. Usable from any thread;
    one thread observes."""

    def __init__(
        self,
        coefficients: Mapping[str, Sequence[float]],
        num_layers: int,
        limits: SliceLimits,
        granularity: Granularity = _TILE,
        choice: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """coefficients: seconds per feature, by slice_kind
        granularity: at which prefills run; chunks make several passes of one
        choice: seconds of the choice of tokens at the end of a step, constant and per row
        """
        self.coefficients = {kind: tuple(values) for kind, values in coefficients.items()}
        self._num_layers = num_layers
        self._limits = limits
        self._granularity = granularity
        self._choice = choice
        self._speed = SpeedFactor()
        # All layers of a pass have the same slices, and the executor asks before each of them.
        self._profiled_s = lru_cache(maxsize=_MAX_KNOWN_SLICES)(self._sum_features)
        self._passes = PassSeconds(self.profiled_s, num_layers, limits)
        self._chunks = RunningSum(self._whole_chunk_s)

    @staticmethod
    def from_profile(
        profile: Profile, num_layers: int, limits: SliceLimits, granularity: Granularity
    ) -> FittedPredictor:
        """A predictor of what the profile showed."""
        coefficients = fit(profile.samples, limits.key_tiles)
        choice = fit_choice(profile.choices)
        return FittedPredictor(coefficients, num_layers, limits, granularity, choice)

    # ---- Predictor ----------------------------------------------------------------------------

    @property
    def speed_factor(self) -> float:
        """Measured over profiled seconds, as of now."""
        return self._speed.value

    @cached_property
    def saturation_tokens(self) -> int:
        """The fewest tokens, in steps of 64, of a pass whose time per token is within 10% of that
        of whole tiles without end; attention over earlier keys is left out of both.

        What is above the limit are the costs of a pass and of a slice: weights read, calls, logits.
        """

        def cost(piece: Slice) -> float:
            return self.profiled_s(without_context(piece))

        passes = PassSeconds(cost, self._num_layers, self._limits)
        tile_rows = self._limits.tile_rows
        limit_s = passes.prefill_pass_s([Span(0, tile_rows)], is_final=False) / tile_rows
        for n in range(_SATURATION_STEP, _MAX_SATURATION_TOKENS, _SATURATION_STEP):
            if passes.prefill_pass_s([Span(0, n)], is_final=True) <= _SATURATED * limit_s * n:
                return n
        return _MAX_SATURATION_TOKENS

    def prefill_s(self, num_tokens: int, num_cached_tokens: int = 0) -> float:
        span = Span(num_cached_tokens, num_tokens)
        if self._granularity.kind == "chunk":
            return self.speed_factor * self._in_chunks_s(span)
        return self.speed_factor * self._passes.prefill_pass_s([span], is_final=True)

    def packed_prefill_s(self, prompts: Sequence[tuple[int, int]]) -> float:
        """Several prompts are one pass at any granularity."""
        if len(prompts) == 1:
            return self.prefill_s(*prompts[0])
        spans = [Span(num_cached, num_tokens) for num_tokens, num_cached in prompts]
        return self.speed_factor * self._passes.prefill_pass_s(spans, is_final=True)

    def decode_step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        if not num_seqs:
            return 0.0
        layers_s = self._decode_layers_s(num_seqs, num_context_tokens)
        logits_s = self.profiled_s(Slice(Group.LOGITS, 0, num_seqs))
        choice_s = self._choice[0] + self._choice[1] * num_seqs
        return self.speed_factor * (layers_s + logits_s + choice_s)

    # ---- single slices ------------------------------------------------------------------------

    def slice_s(self, piece: Slice) -> float:
        """Device seconds of one slice."""
        return self.speed_factor * self.profiled_s(piece)

    def profiled_s(self, piece: Slice) -> float:
        """Device seconds of one slice at speed factor 1; never changes."""
        return self._profiled_s(piece)

    def _sum_features(self, piece: Slice) -> float:
        coefficients = self.coefficients.get(slice_kind(piece))
        if coefficients is None:  # a model of one layer has slices of the head's layer only
            return 0.0
        features = slice_features(piece, self._limits.key_tiles)
        seconds: float = sum(map(mul, coefficients, features))
        return seconds

    def observe(self, busy_s: float, profiled_s: float) -> None:
        """Take in one measured stretch of slices and the sum of their profiled_s."""
        self._speed.observe(busy_s, profiled_s)

    # ---- passes -------------------------------------------------------------------------------

    def _in_chunks_s(self, span: Span) -> float:
        """Passes that end at multiples of the chunk in the prompt, and at the prompt's end."""
        size = self._granularity.chunk_tokens
        first, last = span.start // size + 1, (span.end - 1) // size
        if first > last:
            return self._passes.prefill_pass_s([span], is_final=True)
        total = self._passes.prefill_pass_s([Span(span.start, first * size)], is_final=False)
        total += self._chunks.between(first, last)
        return total + self._passes.prefill_pass_s([Span(last * size, span.end)], is_final=True)

    def _whole_chunk_s(self, index: int) -> float:
        size = self._granularity.chunk_tokens
        span = Span(index * size, (index + 1) * size)
        return self._passes.prefill_pass_s([span], is_final=False)

    def _decode_layers_s(self, num_seqs: int, num_keys: int) -> float:
        """All layers of a step over num_keys keys of all sequences, cut as plan_decode does."""
        num_layers = self._num_layers
        if num_keys <= max_decode_keys(self._limits):
            piece = Slice(Group.LAYERS, 0, num_seqs, num_keys=num_keys, num_layers=num_layers)
            return self.profiled_s(piece)  # linear in the layers, however they are grouped
        layer_s = self.profiled_s(Slice(Group.QKV, 0, num_seqs))
        layer_s += self.profiled_s(Slice(Group.MLP, 0, num_seqs))
        return num_layers * (layer_s + self._decode_attention_s(num_seqs, num_keys // num_seqs))

    def _decode_attention_s(self, num_seqs: int, num_keys: int) -> float:
        """Attention of one layer over num_keys keys of each sequence, cut as plan_decode does."""
        max_keys = max_decode_keys(self._limits)
        most = min(num_seqs, max(1, max_keys // num_keys) if num_keys else num_seqs)
        whole, rest = divmod(num_seqs, most)
        whole_s = self.profiled_s(Slice(Group.ATTENTION, 0, most, num_keys=most * num_keys))
        rest_s = self.profiled_s(Slice(Group.ATTENTION, 0, rest, num_keys=rest * num_keys))
        return whole * whole_s + (rest_s if rest else 0.0)


def fit(samples: Iterable[tuple[Slice, float]], tiles: KeyTiles) -> dict[str, Coefficients]:
    """Least squares per slice kind over (slice, measured seconds); no coefficient is negative.

    Slices that took over three times their kind's fit (another process had the core) are left out
    of a second fit.
    """
    by_kind: dict[str, list[tuple[Coefficients, float]]] = {}
    for piece, seconds in samples:
        features = slice_features(piece, tiles)
        by_kind.setdefault(slice_kind(piece), []).append((features, seconds))
    return {kind: _fit_kind(rows) for kind, rows in by_kind.items()}


def fit_choice(samples: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Constant and seconds per row, from (rows, measured seconds) of choices of tokens."""
    constant, per_row = _fit_kind([((1.0, float(rows)), seconds) for rows, seconds in samples])
    return constant, per_row


def _fit_kind(rows: Sequence[tuple[Coefficients, float]]) -> Coefficients:
    features = np.array([f for f, _ in rows])
    seconds = np.array([s for _, s in rows])
    solution = _nonnegative_least_squares(features, seconds)
    usual = seconds <= 3 * np.maximum(features @ solution, np.median(seconds) / 3)
    if usual.any():
        solution = _nonnegative_least_squares(features[usual], seconds[usual])
    return tuple(map(float, solution))


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
