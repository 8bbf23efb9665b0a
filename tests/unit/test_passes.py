"""Passes in progress: what tokens and blocks of a request become, what is kept, what dropped."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from flowprefill.executor.sampler import SamplingState
from flowprefill.loading import LoadedModel
from flowprefill.passes import Passes
from flowprefill.programs.program import ProgramState
from flowprefill.request_book import LiveRequest
from flowprefill.scheduler.events import DecodeStep, PrefillTask
from tests.factories import make_request, write_tiny_model
from tests.unit.programs.runs import CPU, TILE, Runner, load_quietly, run_to_end

BLOCK = 16


class Blocks:
    """Block ids and cached tokens by request, set by hand. Implements BlockQuestions."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.num_cached: dict[int, int] = {}

    def block_ids(self, req_id: int) -> list[int]:
        return self.ids[req_id]

    def num_cached_tokens(self, req_id: int) -> int:
        return self.num_cached.get(req_id, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_quietly(write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2))


@pytest.fixture
def passes(model: LoadedModel) -> Passes:
    return Passes(model.program, TILE, BLOCK, CPU, Blocks())


def live(req_id: int, prompt_len: int, outputs: Sequence[int] = ()) -> LiveRequest:
    request = make_request(prompt_len, req_id=req_id)
    state = SamplingState(request.sampling, request.prompt_token_ids, (), seed=0)
    state.output_token_ids += outputs
    return LiveRequest(request, state, put_s=0.0)


def give_blocks(passes: Passes, **ids: list[int]) -> None:
    assert isinstance(passes.blocks, Blocks)
    passes.blocks.ids.update({int(name[1:]): block_ids for name, block_ids in ids.items()})


def run_slices(state: ProgramState, count: int) -> None:
    for _ in range(count):
        state.run_slice()


def test_parked_prefill_is_found_again_and_others_are_their_own(passes: Passes) -> None:
    requests = {1: live(1, 20), 2: live(2, 30)}
    give_blocks(passes, r1=[0, 1], r2=[2, 3])
    first = passes.prefill(PrefillTask(10, (1,)), requests)
    run_slices(first.state, 2)
    second = passes.prefill(PrefillTask(11, (2,)), requests)
    assert second is not first
    assert passes.prefill(PrefillTask(10, (1,)), requests) is first
    assert not passes.is_empty
    assert passes.live_bytes == first.state.live_bytes + second.state.live_bytes > 0
    passes.prefills.clear()
    assert passes.is_empty and passes.live_bytes == 0


def test_pack_keeps_the_rows_of_members_that_leave(passes: Passes) -> None:
    requests = {1: live(1, 20), 2: live(2, 30)}
    give_blocks(passes, r1=[0, 1], r2=[2, 3])
    pack = passes.prefill(PrefillTask(10, (1, 2)), requests)
    del requests[1]
    assert passes.prefill(PrefillTask(10, (2,)), requests) is pack
    assert pack.req_ids == (1, 2)
    assert run_to_end(pack.state).shape[0] == 2


def test_prefill_starts_behind_what_was_cached(passes: Passes, model: LoadedModel) -> None:
    request = live(1, 40)
    runner = Runner(model, num_sequences=1)
    expected = runner.prefill(request.token_ids)
    blocks = runner.tables[0].ids[:3].tolist()  # the whole prompt is in them now
    give_blocks(passes, r1=blocks)
    assert isinstance(passes.blocks, Blocks)
    passes.blocks.num_cached[1] = 32
    state = passes.prefill(PrefillTask(10, (1,)), {1: request}).state
    assert state.next_slice.num_rows == 8
    assert torch.equal(run_to_end(state)[0], expected)


def test_evicted_stream_computes_prompt_and_answer_up_to_its_next_token(
    passes: Passes, model: LoadedModel
) -> None:
    request = live(1, 40, outputs=[3, 1, 4, 1, 5])
    give_blocks(passes, r1=[5, 9, 2])
    state = passes.prefill(PrefillTask(10, (1,)), {1: request}).state
    assert state.next_slice.num_rows == 45
    expected = Runner(model, num_sequences=1).prefill(request.token_ids)
    assert torch.equal(run_to_end(state)[0], expected)


def test_decode_goes_on_in_blocks_that_were_added(passes: Passes, model: LoadedModel) -> None:
    """The 17th token is the first in its second block."""
    request = live(1, 16)
    give_blocks(passes, r1=[7])
    run_to_end(passes.prefill(PrefillTask(10, (1,)), {1: request}).state)
    request.sampling.output_token_ids.append(42)
    give_blocks(passes, r1=[7, 3])
    decode = passes.decode(DecodeStep((1,)), {1: request})
    assert request.table is not None and request.table.num_blocks == 2
    expected = Runner(model, num_sequences=1).prefill(request.token_ids)
    assert torch.equal(run_to_end(decode.state)[0], expected)


def test_step_left_midway_is_kept_whatever_is_asked_for(passes: Passes) -> None:
    requests = {1: live(1, 20), 2: live(2, 30), 3: live(3, 5)}
    give_blocks(passes, r1=[0, 1], r2=[2, 3], r3=[4])
    pack = passes.prefill(PrefillTask(10, (1, 2, 3)), requests)
    run_to_end(pack.state)
    passes.prefills.clear()
    for request in requests.values():
        request.sampling.output_token_ids.append(8)
    step = passes.decode(DecodeStep((1, 2)), requests)
    run_slices(step.state, 3)
    assert passes.decode(DecodeStep((1, 2, 3)), requests) is step
    assert not passes.is_empty
    passes.drop_step_of([3, 77])
    assert passes.decode(DecodeStep((3,)), requests) is step
    passes.drop_step_of([77, 2])
    assert passes.is_empty
    assert passes.decode(DecodeStep((1, 3)), requests).req_ids == (1, 3)
