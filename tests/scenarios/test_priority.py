"""Ranks, deadlines, ageing and the bounds of the queue: who goes first, and who is told no."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flowprefill.config import EngineConfig
from flowprefill.errors import QueueFullError
from flowprefill.metrics import percentile
from flowprefill.request import Request
from flowprefill.retry_after import read_retry_after_s
from flowprefill.scheduler.ageing import PERIOD_S
from flowprefill.simulator.simulator import RequestRecord
from tests.engine_harness import Harness, alone, patient, running, with_slo
from tests.factories import write_tiny_model
from tests.unit.scheduler.device import Device
from tests.unit.scheduler.helpers import SLICE_S, make_arrival, make_scheduler

C = 32
"""Tokens of a prompt of one tick; prompts of 8 C are too long to be packed."""
NUM_LAYERS = 2
ELSEWHERE = {
    4: ["tests/unit/test_engine_queue.py::test_higher_rank_goes_before_an_earlier_deadline"],
    6: [
        "tests/unit/scheduler/test_ageing.py::test_a_low_rank_progresses_behind_a_stream_of_high_ranks",
        "tests/unit/scheduler/test_ageing.py::test_without_a_share_it_starves",
    ],
    7: [
        "tests/unit/scheduler/test_policy.py::test_ties_go_to_the_earlier_arrival_then_to_the_smaller_id",
        "tests/unit/test_request.py::test_an_objective_out_of_range_names_field_value_and_limit",
        "tests/e2e/test_openai.py::test_a_bad_request_is_a_400_naming_the_field",
    ],
    8: [
        "tests/unit/test_engine_queue.py::test_bound_on_tokens_counts_what_waits_and_lets_a_lone_prompt_pass",
        "tests/unit/test_admission.py::test_a_refused_request_leaves_no_trace",
        "tests/e2e/test_openai.py::test_a_full_queue_is_a_429_that_says_when_to_come_again",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    return write_tiny_model(directory, num_layers=NUM_LAYERS, max_len=1536)


def num_slices_of(model: Path, request: Request) -> int:
    """Slices of a request alone."""
    with running(model) as h:
        h.submit(request)
        h.play()
        return h.device.num_slices


# ---- ranks --------------------------------------------------------------------------------------


def test_a_high_rank_starts_at_once_although_all_slots_are_taken(model: Path) -> None:
    """Row 4, vllm#40004: preemption fires on KV shortage only, and the slots are all taken."""
    streams = [patient(i, 40 + i, max_tokens=300) for i in range(4)]
    high = with_slo(patient(9, 64, max_tokens=30), rank=1)
    of_prefill = num_slices_of(model, with_slo(patient(9, 64, max_tokens=1), rank=1))
    arrived_at: list[int] = []

    def arrive() -> None:
        assert h.engine.stats().num_decoding == 4
        arrived_at.append(h.device.num_slices)
        h.submit(high)

    with running(model, max_num_seqs=4) as h:
        h.at_token(0, 50, arrive)
        h.submit(*streams)
        h.play()
        # What is in the way at most: the slice of a step that is running
        assert h.first_token_slice(9) <= arrived_at[0] + 1 + of_prefill
    expected = alone(model, *streams, high)
    assert {req_id: h.answer(req_id) for req_id in expected} == expected


@pytest.mark.parametrize(("rank", "place"), [(1, 0), (0, 30)])
def test_a_high_rank_passes_a_queue_of_low_ones_and_the_prefill_that_runs(
    model: Path, rank: int, place: int
) -> None:
    """Row 5, vllm#24365: an urgent request under 30 low ones takes twice its idle time.

    The control is an equal: it waits for all thirty.
    """
    lows = [patient(i, 8 * C, max_tokens=1) for i in range(30)]
    newcomer = with_slo(patient(99, 2 * C, max_tokens=1), rank=rank)
    of_newcomer = num_slices_of(model, newcomer)
    with running(model) as h:
        h.at_slice(3, lambda: h.submit(newcomer))
        h.submit(*lows)
        h.play()
        assert h.first_token_order().index(99) == place
        if rank:
            assert h.first_token_slice(99) == 3 + 1 + of_newcomer


class FullLoad(Device):
    """So many clients send a high request of 100 ms each, and the next when it is answered."""

    NUM_CLIENTS = 16
    FIRST_ID = 100

    def start(self) -> None:
        for req_id in range(self.FIRST_ID, self.FIRST_ID + self.NUM_CLIENTS):
            self._send(req_id)

    def on_token(self, record: RequestRecord) -> None:
        super().on_token(record)
        if record.arrival.req_id >= self.FIRST_ID:
            self._send(record.arrival.req_id + self.NUM_CLIENTS)

    def _send(self, req_id: int) -> None:
        self.submit(make_arrival(req_id, self.now_s, max_tokens=1, rank=1))

    def p95_s(self, from_s: float = 0.0, to_s: float = math.inf) -> float:
        """TTFT of those that were answered in a stretch of time."""
        answered = [
            req_id
            for req_id, (first_s, *_) in self.token_times.items()
            if req_id >= self.FIRST_ID and from_s <= first_s <= to_s
        ]
        return percentile([self.ttft_s(req_id) for req_id in answered], 95)


@pytest.mark.parametrize("share", [0.05, 0.1])
@pytest.mark.parametrize("policy", ["goodput", "s-edf", "fcfs"])
def test_a_low_rank_starts_within_the_bound_and_costs_the_high_ones_little(
    policy: str, share: float
) -> None:
    """Row 6, vllm PR#20608: strict priority starves a low class for ever.

    The bound is 2 x PERIOD_S behind its deadline; what it costs is `starvation_share`.
    """
    lasts_s, slo_s = 120.0, 1.0
    load = FullLoad(make_scheduler(policy, starvation_share=share))
    load.submit(make_arrival(0, num_prompt_tokens=1000, max_tokens=1, ttft_slo_s=slo_s))
    load.start()
    load.run(until_s=lasts_s)
    without = FullLoad(make_scheduler(policy, starvation_share=share))
    without.start()
    without.run(until_s=lasts_s)
    first_s = min(ran.start_s for ran in load.log if ran.req_ids == (0,))
    assert 0.1 < first_s <= slo_s + 2 * PERIOD_S + SLICE_S
    assert load.records[0].ended == "finished"
    # Of those that it may have held up: the last of them came before its end.
    usual_s, end_s = without.p95_s(), load.token_times[0][0]
    assert load.p95_s(first_s, end_s + usual_s) < (1 + 2 * share) * usual_s


# ---- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["goodput", "s-edf", "edf"])
@pytest.mark.parametrize(
    ("config", "order"),
    [
        # Longer than any that is named: who names none goes last.
        (EngineConfig("model", ttft_slo_ms=60_000), [0, 2, 1, 3, 4]),
        # 1 s as shipped. Due at 1.0 and 1.3 s, those that name none are more urgent than the one
        # that gave itself until 2.0 s; only the one that is due at 1.1 s passes the later of them.
        (EngineConfig("model"), [0, 3, 2, 4, 1]),
    ],
    ids=["longer", "as shipped"],
)
def test_the_earlier_deadline_goes_first_whoever_came_first(
    policy: str, config: EngineConfig, order: list[int]
) -> None:
    """Row 7, gateway-api-inference-extension#2504: the tighter target that came later must pass.

    A request without a target has the model's, and with it a deadline like any other.
    """
    device = Device(make_scheduler(policy))
    busy = make_arrival(0, num_prompt_tokens=500, max_tokens=1, ttft_slo_s=0.6)
    device.submit(busy)
    for req_id, arrival_s, slo in (
        (1, 0.0, config.slo(ttft_slo_ms=2000)),
        (2, 0.3, config.slo(ttft_slo_ms=800)),
        (3, 0.0, config.slo()),
        (4, 0.3, config.slo()),
    ):
        device.submit(make_arrival(req_id, arrival_s, max_tokens=1, ttft_slo_s=slo.ttft_s))
    device.run()
    assert device.prefill_order() == order


# ---- the bounds of the queue --------------------------------------------------------------------


def refusals_of(h: Harness, requests: list[Request]) -> list[str]:
    """What those are told that find no place."""
    refusals = []
    for request in requests:
        try:
            h.submit(request)
        except QueueFullError as error:
            refusals.append(str(error))
    return refusals


@pytest.mark.parametrize(("num_ticks", "num_taken"), [(1, 16), (4, 8)])
def test_a_burst_is_taken_up_to_the_bounds_and_told_when_to_come_again(
    model: Path, num_ticks: int, num_taken: int
) -> None:
    """Row 8, vllm#18826: the queue has no bound, and what is taken waits without one.

    At most 16 requests and 32 C tokens may wait.
    """
    running_one = patient(1, 300, max_tokens=8)
    burst = [patient(100 + i, num_ticks * C, max_tokens=1) for i in range(200)]
    lone = patient(2, 31 * C, max_tokens=1)
    refusals: list[str] = []
    with running(model, max_waiting_requests=16, max_waiting_tokens=32 * C) as h:
        h.at_slice(2, lambda: refusals.extend(refusals_of(h, burst)))
        h.submit(running_one)
        h.play()
        assert len(refusals) == 200 - num_taken
        assert all(read_retry_after_s(refusal) is not None for refusal in refusals)
        assert h.engine.stats().num_started == 1 + num_taken
        taken = {r.req_id for r in burst[:num_taken]}
        assert set(h.first_token_order()) == {1, *taken}
        h.submit(lone)  # finds nobody waiting
        h.play()
    expected = alone(model, running_one, lone)
    assert {req_id: h.answer(req_id) for req_id in expected} == expected
