"""DecodePacer: which sequences the next decode step takes, and how long it may wait for prefills.

A step is released one step, one slice and a margin before the first of its tokens is due: earlier
would only take time from prefills, later would be late as often as not. Steps are spaced so that,
while prefills want the device, decode takes at most `max_decode_share` of it, even where that makes
tokens late.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from flowprefill.predictor.base import Predictor
from flowprefill.scheduler.events import DecodeStep, PacedSteps
from flowprefill.scheduler.policy import slack_s
from flowprefill.scheduler.tracked import Tracked

TBT_MARGIN = 0.1
"""Share of the TBT objective that is kept for what nobody predicts: a step or a slice that takes
longer, and the token's way to the client."""
DECODE_SHARE_LIMIT = 0.95
"""Upper bound of max_decode_share: prefills always keep some of the device."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The decode step that would run now, and when it has to."""

    step: DecodeStep
    step_s: float
    """Predicted device time."""
    due_s: float
    """When the first of its tokens is due."""
    release_s: float
    """Before this time prefills go first."""
    interval_s: float
    """From the end of one such step to the release of the next."""
    stretch: float
    """Wall time per device second of a prefill beside such steps: 1 / (1 - decode share)."""

    def paced(self, prefill: Tracked, now_s: float, max_steps: int) -> PacedSteps:
        """The steps to run beside `prefill`.

        The first one waits for a prefill that has the earlier deadline and would miss it by waiting
        for the step. Such a prefill can be on time only before the token is due, so a stream of
        them delays a token up to its due time and never beyond.
        """
        release_s = self.release_s
        misses_by_waiting = 0 <= slack_s(prefill, now_s) < self.step_s
        if misses_by_waiting and prefill.deadline_s < self.due_s:
            release_s = max(release_s, self.due_s)
        return PacedSteps(self.step, release_s, self.interval_s, max_steps)


class DecodePacer:
    """Plans decode steps and remembers when the last one ended."""

    def __init__(
        self,
        predictor: Predictor,
        *,
        max_num_seqs: int,
        max_slice_s: float,
        max_decode_share: float,
    ) -> None:
        self._predictor = predictor
        self._max_num_seqs = max_num_seqs
        self._max_slice_s = max_slice_s
        self._max_share = min(max_decode_share, DECODE_SHARE_LIMIT)
        self._last_step_end_s = float("-inf")

    def members(self, decoding: Collection[Tracked]) -> list[Tracked]:
        """The sequences of the next step: all, or those due first if they are too many."""
        sequences = list(decoding)
        if len(sequences) > self._max_num_seqs:
            sequences.sort(key=lambda s: (s.due_s, s.req_id))
            del sequences[self._max_num_seqs :]
        return sequences

    def plan(self, sequences: Collection[Tracked]) -> StepPlan | None:
        """The next step, over these sequences."""
        if not sequences:
            return None
        step_s = self._predictor.decode_step_s(
            len(sequences), sum(s.num_context_tokens for s in sequences)
        )
        due_s = min(s.due_s for s in sequences)
        tbt_slo_s = min(s.tbt_slo_s for s in sequences)
        ahead_s = step_s + self._max_slice_s + TBT_MARGIN * tbt_slo_s
        prefill_time_s = step_s * (1 / self._max_share - 1)  # owed to prefills between two steps
        share = min(step_s / ((1 - TBT_MARGIN) * tbt_slo_s), self._max_share)
        return StepPlan(
            step=DecodeStep(tuple(s.req_id for s in sequences)),
            step_s=step_s,
            due_s=due_s,
            release_s=max(due_s - ahead_s, self._last_step_end_s + prefill_time_s),
            interval_s=max(tbt_slo_s - ahead_s, prefill_time_s),
            stretch=1 / (1 - share),
        )

    def step_ended(self, end_s: float) -> None:
        self._last_step_end_s = end_s
