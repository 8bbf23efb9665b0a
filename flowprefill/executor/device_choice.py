"""Choosing tokens where the logits are, on CUDA: a few numbers go to the host in their stead.

The logits of 64 rows of a vocabulary of 128,000 are 33 MB, and numpy takes 0.3 ms (greedy) to 4 ms
(top_p) a row for them (one CPU core): longer than the decode step that they come from. Rows that
need more than a draw (penalties, logprobs) still go to the host (sampler.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from flowprefill.kernels import keep_compiled_kernels
from flowprefill.kv.host_copies import floats_to_device, to_host


class Draw(NamedTuple):
    """How one row's token is drawn; kernels/sampling.py has the meanings."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0


class Chosen(NamedTuple):
    """What a draw gave."""

    token_id: int
    logprob: float
    is_finite: bool
    """Whether all logits of the row are; else there is no token."""


Choose: TypeAlias = Callable[[Tensor, Sequence[Draw]], list[Chosen]]
"""Of logits [num_rows, vocab] fp32 on the device, a token for each row. A row's outcome depends on
nothing but the row and its draw."""


def choose_by_kernel(logits: Tensor, draws: Sequence[Draw]) -> list[Chosen]:
    """Implements Choose."""
    from flowprefill.kernels.sampling import choose

    found = to_host(choose(logits.contiguous(), floats_to_device(draws, logits.device)))
    return [Chosen(int(token), logprob, finite > 0) for token, logprob, finite in found.tolist()]


def device_choice(device: torch.device, vocab_size: int) -> Choose | None:
    """How tokens are chosen on this device; None: on the host."""
    if device.type != "cuda" or why_not_by_kernel(device, vocab_size):
        return None
    return choose_by_kernel


@functools.cache
def why_not_by_kernel(device: torch.device, vocab_size: int) -> str | None:
    """What keeps the kernel from running on this card; None: nothing does.

    It is compiled in the first call, which is made at load. What that finds stays true, so that the
    tokens of a seed do not change under a running engine.
    """
    keep_compiled_kernels()
    try:
        choose_by_kernel(torch.zeros(1, vocab_size, device=device), [Draw(1.0, 2, 0.9)])
    # no triton, or whatever its compiler, the driver or a card that is too old may raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    return None


def report_choice(
    device: torch.device, vocab_size: int, on_progress: Callable[[str, float], None]
) -> None:
    """Call it at load: a stage says why, where a card's tokens are chosen on the host."""
    problem = why_not_by_kernel(device, vocab_size) if device.type == "cuda" else None
    if problem:
        on_progress(f"no kernel that chooses tokens, the host does: {problem}", 1.0)
