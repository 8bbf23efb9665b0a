"""Passes: the forward passes in progress - parked prefills, and a decode step left midway.

Knows how a request's tokens and blocks become the input of a pass; not what runs when.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from flowprefill.granularity import Granularity
from flowprefill.kv.block_table import BlockTable
from flowprefill.programs.program import Program, ProgramState, SequenceInput
from flowprefill.request_book import LiveRequest
from flowprefill.scheduler.events import DecodeStep, PrefillTask


@dataclass
class Pass:
    """One forward pass, and whose rows its logits are."""

    req_ids: tuple[int, ...]
    """In the order of the rows. Members that are no longer live stay in it."""
    state: ProgramState
    predicted_s: float = 0.0
    """Of a prefill: what it was predicted to take when it began."""
    busy_s: float = 0.0
    """Of a prefill: device time so far."""


class BlockQuestions(Protocol):
    """What is asked of the Scheduler."""

    def block_ids(self, req_id: int) -> list[int]: ...
    def num_cached_tokens(self, req_id: int) -> int: ...


@dataclass
class Passes:
    """Creates, keeps and drops passes."""

    program: Program
    granularity: Granularity
    block_size: int
    device: torch.device
    blocks: BlockQuestions
    prefills: dict[int, Pass] = field(default_factory=dict)
    """Started and unfinished, by task id."""
    step: Pass | None = None
    """A decode step that was left midway."""

    def prefill(self, task: PrefillTask, live: Mapping[int, LiveRequest]) -> Pass:
        """The task's pass: the parked one, or a new one."""
        found = self.prefills.get(task.task_id)
        if found is None:
            inputs = [self._prefill_input(req_id, live[req_id]) for req_id in task.req_ids]
            found = Pass(task.req_ids, self.program.prefill(inputs, self.granularity))
            self.prefills[task.task_id] = found
        return found

    def decode(self, step: DecodeStep, live: Mapping[int, LiveRequest]) -> Pass:
        """The step that was left midway, whatever its members, or a new one."""
        if self.step is None:
            inputs = [self._decode_input(req_id, live[req_id]) for req_id in step.req_ids]
            self.step = Pass(step.req_ids, self.program.decode(inputs))
        return self.step

    def drop_step_of(self, req_ids: Collection[int]) -> None:
        """These have no blocks any more. A step with one of them runs again for the others."""
        if self.step and not set(req_ids).isdisjoint(self.step.req_ids):
            self.step = None

    @property
    def is_empty(self) -> bool:
        return not self.prefills and self.step is None

    @property
    def live_bytes(self) -> int:
        """Bytes of the tensors that the passes hold beside their KV blocks."""
        return sum(p.state.live_bytes for p in list(self.prefills.values()))

    def _prefill_input(self, req_id: int, request: LiveRequest) -> SequenceInput:
        request.table = BlockTable(self.blocks.block_ids(req_id), self.block_size, self.device)
        start = self.blocks.num_cached_tokens(req_id)
        return SequenceInput(request.token_ids[start:], start, request.table)

    def _decode_input(self, req_id: int, request: LiveRequest) -> SequenceInput:
        assert request.table is not None, "a decoding request has blocks"
        grown: Sequence[int] = self.blocks.block_ids(req_id)[request.table.num_blocks :]
        if grown:
            request.table.extend(grown)
        outputs = request.sampling.output_token_ids
        start = len(request.request.prompt_token_ids) + len(outputs) - 1
        return SequenceInput(outputs[-1:], start, request.table)
