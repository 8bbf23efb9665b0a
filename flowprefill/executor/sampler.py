"""Logits -> next token of each row, as each request's SamplingParams ask.

Each row is worked on alone, on the CPU and in numpy (whose reductions depend on neither thread
count nor batch), with a random stream of its own: a request's tokens do not depend on which others
share its step. On CUDA that holds for rows that need more than a draw; others stay on the device
(device_choice.py), and which those are depends on the request alone too. The steps of one row, in
vLLM's order: logit_bias; no EOS or stop token before min_tokens; repetition, frequency and presence
penalties; temperature; top_k; top_p; min_p; draw. Logprobs are those of the model: the log-softmax
of the logits before any of these steps.

Equal logits rank by token id, lowest first, so argmax, top_k, top_p and ranks agree on ties.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from flowprefill.executor.device_choice import Choose, Chosen, Draw, device_choice
from flowprefill.kv.host_copies import to_device, to_host
from flowprefill.request import FinishReason, Logprob
from flowprefill.sampling_params import SamplingParams

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
_NOT_FINITE = "the model gave a logit that is not finite"


@dataclass(frozen=True)
class Sampled:
    """One row's outcome: a token, or an error that concerns this row alone."""

    token_id: int
    """-1 with an error."""
    logprob: float = 0.0
    top_logprobs: list[Logprob] = field(default_factory=list)
    """The chosen token first, then the most likely others, if SamplingParams.logprobs asked."""
    error: str | None = None
    """Why no token can be chosen; fails this request with INTERNAL."""


class SamplingState:
    """What one request's next token depends on beside its logits, kept from token to token."""

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Collection[int],
        seed: int,
    ) -> None:
        """`seed` serves if params bring none; any integer."""
        self.params = params
        self.output_token_ids: list[int] = []
        """Tokens chosen so far; whoever takes a sampled token appends it."""
        self._ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._ends |= frozenset(eos_token_ids)
        # vLLM holds EOS back until min_tokens even where it would not end the answer.
        self._held_back = _to_ids(self._ends | frozenset(eos_token_ids))
        # 64 bits, unsigned: random.Random takes -5 for 5.
        self._random = random.Random((params.seed if params.seed is not None else seed) % 2**64)
        is_repetition_penalized = params.repetition_penalty != 1.0
        self._prompt_ids = np.unique(_to_ids(prompt_token_ids if is_repetition_penalized else ()))
        self._output_counts: Counter[int] = Counter()
        self._num_counted = 0

    def finish_reason(self, token_id: int) -> FinishReason | None:
        """Whether `token_id`, just appended to output_token_ids, ends the answer.

        An EOS or stop token wins over max_tokens.
        """
        num_tokens = len(self.output_token_ids)
        if token_id in self._ends and num_tokens > self.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self.params.max_tokens else None

    def next_uniform(self) -> float:
        """The next number of the request's own stream, in [0, 1)."""
        return self._random.random()

    @property
    def _is_held_back(self) -> bool:
        """No EOS or stop token may come yet."""
        return len(self.output_token_ids) < self.params.min_tokens and self._held_back.size > 0

    @property
    def _is_penalized(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.frequency_penalty != 0.0
            or params.presence_penalty != 0.0
        )

    @property
    def _is_adjusted(self) -> bool:
        """Something is asked for that changes logits."""
        return bool(self.params.logit_bias) or self._is_held_back or self._is_penalized

    @property
    def is_plain(self) -> bool:
        """Whether a draw from the logits as they are is all that is asked for."""
        return not self._is_adjusted and self.params.logprobs is None

    def next_draw(self) -> Draw:
        """Of the next token, if is_plain."""
        params = self.params
        if params.temperature == 0:
            return Draw(0.0)
        uniform = self.next_uniform()
        return Draw(params.temperature, params.top_k, params.top_p, params.min_p, uniform)

    def adjust(self, logits: Row) -> Row:
        """Logits after bias, min_tokens and penalties: a new array, or `logits` if none applies."""
        params = self.params
        if not self._is_adjusted:
            return logits
        adjusted = logits.copy()
        if params.logit_bias:
            adjusted[_to_ids(params.logit_bias)] += np.array([*params.logit_bias.values()], "f4")
        if self._is_held_back:
            adjusted[self._held_back] = -np.inf
        if self._is_penalized:
            self._penalize(adjusted)
        return adjusted

    def _penalize(self, logits: Row) -> None:
        """In place. Repetition looks at prompt and output, the other two at the output."""
        self._output_counts.update(self.output_token_ids[self._num_counted :])
        self._num_counted = len(self.output_token_ids)
        output_ids = _to_ids(self._output_counts)
        counts = np.fromiter(self._output_counts.values(), np.float32, len(self._output_counts))
        penalty = np.float32(self.params.repetition_penalty)
        if penalty != 1.0:
            seen = np.union1d(self._prompt_ids, output_ids)
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        per_token = np.float32(self.params.frequency_penalty) * counts
        logits[output_ids] -= per_token + np.float32(self.params.presence_penalty)


class Sampler:
    """Chooses tokens for the rows of one step."""

    def __init__(self, vocab_size: int, choose: Choose | None = None) -> None:
        """choose: of rows that need no more, on any device; None = the device's own, if any"""
        self.vocab_size = vocab_size
        self._choose = choose

    def sample(self, logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
        """One token per row; does not append it to the states.

        logits: [len(states), vocab_size], any float dtype and device, read only.
        A row with a non-finite logit gets an error; the others are not touched by it.
        """
        assert logits.shape == (len(states), self.vocab_size), (logits.shape, len(states))
        choose = self._choose or device_choice(logits.device, self.vocab_size)
        if choose is None:
            return _sample_on_host(logits, states)
        plain = [i for i, state in enumerate(states) if state.is_plain]
        if not plain:
            return _sample_on_host(logits, states)
        others = sorted(set(range(len(states))).difference(plain))
        draws = [states[i].next_draw() for i in plain]
        chosen = choose(_rows(logits, plain).float(), draws)
        sampled = dict(zip(plain, map(_to_sampled, chosen), strict=True))
        if others:
            on_host = _sample_on_host(_rows(logits, others), [states[i] for i in others])
            sampled.update(zip(others, on_host, strict=True))
        return [sampled[i] for i in range(len(states))]


def _rows(logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    return logits if len(rows) == len(logits) else logits[to_device(rows, logits.device)]


def _to_sampled(chosen: Chosen) -> Sampled:
    if not chosen.is_finite:
        return Sampled(-1, error=_NOT_FINITE)
    return Sampled(chosen.token_id, chosen.logprob)


def _sample_on_host(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Sampled]:
    rows = to_host(logits.detach()).float().numpy()
    # Overflow is looked for in the results.
    with np.errstate(over="ignore", invalid="ignore"):
        return [_sample_row(row, state) for row, state in zip(rows, states, strict=True)]


def _sample_row(row: Row, state: SamplingState) -> Sampled:
    if not np.isfinite(row).all():
        return Sampled(-1, error=_NOT_FINITE)
    adjusted = state.adjust(row)
    token_id = int(adjusted.argmax())
    if not np.isfinite(adjusted[token_id]):
        return Sampled(-1, error="min_tokens, logit_bias and penalties leave no token to choose")
    if state.params.temperature > 0:
        token_id = _draw(adjusted, state.params, state.next_uniform())
    peak = row.max()
    log_total = float(peak) + math.log(np.exp(row - peak).sum(dtype=np.float64))
    tops = []
    if state.params.logprobs is not None:
        tops = _top_logprobs(row, log_total, token_id, state.params.logprobs)
    return Sampled(token_id, float(row[token_id]) - log_total, tops)


def _draw(logits: Row, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` of the distribution that temperature, top_k, top_p and min_p leave."""
    peak = logits.max()
    # Largest weight 1; what underflows to 0 is never drawn.
    weights = np.exp((logits - peak) / np.float32(params.temperature))
    kept: Any = slice(None)
    if 0 < params.top_k < weights.size:
        # Ranked by logit: weights that underflowed are not in order.
        kept = _largest(logits, params.top_k)
    if params.top_p < 1.0:
        nucleus = _nucleus(weights[kept], params.top_p)
        kept = nucleus if isinstance(kept, slice) else kept[nucleus]
    weights = weights[kept]
    if params.min_p > 0.0:
        weights = np.where(weights >= np.float32(params.min_p), weights, np.float32(0))
    mass = np.cumsum(weights, dtype=np.float64)
    # The second term: rounding up to the total must not run past the last weight above 0.
    index = min(
        int(np.searchsorted(mass, uniform * mass[-1], side="right")),
        int(np.searchsorted(mass, mass[-1], side="left")),
    )
    return index if isinstance(kept, slice) else int(kept[index])


def _nucleus(weights: Row, top_p: float) -> Ids:
    """Indices of the fewest weights, largest first, whose sum reaches `top_p` of the total."""
    total = weights.sum(dtype=np.float64)
    # All weights below this add up to less than 1 - top_p of the total: outside, and not sorted.
    floor = (1.0 - top_p) * total / weights.size
    descending = np.sort(weights[weights >= floor])[::-1]
    mass = np.cumsum(descending, dtype=np.float64)
    count = int(np.searchsorted(mass, top_p * total, side="left")) + 1
    return _at_least(weights, descending[min(count, descending.size) - 1], count)


def _largest(values: Row, count: int) -> Ids:
    """Indices of the `count` largest values, ascending; of equal values the first."""
    return _at_least(values, np.partition(values, values.size - count)[values.size - count], count)


def _at_least(values: Row, threshold: np.float32, count: int) -> Ids:
    """Indices, ascending, of all values above `threshold` and of the first ones equal to it, so
    that there are `count`."""
    above = values > threshold
    equal = np.flatnonzero(values == threshold)
    above[equal[: count - int(np.count_nonzero(above))]] = True
    return np.flatnonzero(above)


def _top_logprobs(row: Row, log_total: float, token_id: int, count: int) -> list[Logprob]:
    """The chosen token, then the `count` most likely ones without it."""
    value = row[token_id]
    rank = 1 + int((row > value).sum()) + int((row[:token_id] == value).sum())
    tops = [Logprob(token_id, float(value) - log_total, rank)]
    ids = _largest(row, min(count, row.size)) if count > 0 else _to_ids(())
    by_rank = ids[np.argsort(-row[ids], kind="stable")]
    for other_rank, other in enumerate(map(int, by_rank), start=1):
        if other != token_id:
            tops.append(Logprob(other, float(row[other]) - log_total, other_rank))
    return tops


def _to_ids(token_ids: Collection[int]) -> Ids:
    """Token ids (of a dict: its keys) as an index array."""
    return np.fromiter(token_ids, np.int64, len(token_ids))
