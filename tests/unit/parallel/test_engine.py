"""An Engine whose model is divided: the tokens of one rank, and what becomes of a lost rank."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from flowprefill.config import EngineConfig
from flowprefill.engine_process import EngineClient
from flowprefill.errors import EngineDeadError
from flowprefill.request import FinishReason, Request
from tests.engine_harness import WAIT_S, Harness, alone, patient, running, urgent, wait_until
from tests.factories import make_request, write_tiny_model
from tests.unit.test_engine_process_model import Outputs, answers

CONFIG = {"dtype": "float32", "enable_prefix_caching": False}
DIVIDED = {**CONFIG, "tensor_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)


def requests(first_id: int) -> list[Request]:
    """A long prompt that gives way to a short one, and a sampled one; the same for each id."""
    return [
        patient(first_id, 300, seed=1, logprobs=2),
        urgent(first_id + 1, 20, seed=2, logprobs=2),
        urgent(first_id + 2, 90, seed=3, max_tokens=8),
    ]


def test_two_ranks_give_the_tokens_of_one_and_their_own_bits_when_preempted(model: Path) -> None:
    expected = alone(model, *requests(1), **CONFIG)
    with running(model, **DIVIDED) as h:
        assert h.engine.info.kernels == "torch, 2 ranks"
        for request in requests(1):
            h.submit(request)
            h.end(request.req_id)
        first, second, third = requests(11)
        start = h.device.num_slices
        h.at_slice(start + 1, lambda: h.submit(second))
        h.at_slice(start + 3, lambda: h.submit(third))
        h.submit(first)
        h.play()
        assert h.engine.stats().num_preemptions >= 1
        for req_id in (1, 2, 3):
            assert h.answer(req_id) == h.answer(req_id + 10)
            assert h.tokens(req_id) == [token for token, *_ in expected[req_id]]


def test_cancelled_and_evicted_requests_leave_the_others_right(model: Path) -> None:
    """Blocks change hands, and passes are dropped midway, on all ranks."""
    one, two = patient(1, 200, seed=4, max_tokens=40), patient(2, 200, seed=5, max_tokens=40)
    block_bytes = 2 * 2 * 16 * (1 * 16) * 4  # K and V of 2 layers, 16 tokens of a head of fp32
    with running(model, **DIVIDED, kv_cache_memory_bytes=28 * block_bytes) as h:
        for request in (one, two):
            h.submit(request)
            h.end(request.req_id)
        start = h.device.num_slices
        gone = patient(3, 200, seed=6)
        h.at_slice(start + 2, lambda: h.engine.cancel(3))
        h.submit(gone)
        h.end(3)
        h.submit(dataclasses.replace(one, req_id=11), dataclasses.replace(two, req_id=12))
        h.play()
        assert h.end(3).finish_reason is FinishReason.CANCELLED
        for req_id in (1, 2):
            assert h.answer(req_id) == h.answer(req_id + 10)
        assert h.engine.stats().num_evictions


class _Over(Exception):
    """Leaves the harness, whose engine will not come to rest."""


def kill_a_rank(h: Harness) -> None:
    assert h.engine._ranks is not None
    os.kill(h.engine._ranks.pids[0], signal.SIGKILL)


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_killed_rank_is_the_engine_s_death(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_idle: bool
) -> None:
    hooked: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", hooked.append)
    with pytest.raises(_Over), running(model, **DIVIDED) as h:
        if is_idle:
            kill_a_rank(h)
        else:
            h.at_slice(h.device.num_slices + 3, lambda: kill_a_rank(h))
            h.submit(patient(1), patient(2))
            for req_id in (1, 2):
                end = h.end(req_id)
                assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
                assert "rank 1 of 2 was killed by SIGKILL" in (end.error_message or "")
        h.engine._thread.join(WAIT_S)
        assert not h.engine._thread.is_alive()
        with pytest.raises(EngineDeadError, match="rank 1 of 2 was killed by SIGKILL"):
            h.engine.submit(urgent(4))
        raise _Over
    assert ["was killed by SIGKILL" in str(args.exc_value) for args in hooked] == [True]


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def test_the_engine_process_is_restarted_when_a_rank_was_killed(model: Path) -> None:
    config = EngineConfig(str(model), device="cpu", num_threads=1, max_model_len=192, **DIVIDED)
    outputs, log = Outputs(), list[str]()
    client = EngineClient(config, outputs, log.append)
    client.start()
    try:
        before = answers(client, outputs)
        outputs.of.clear()
        first_life = client.pid
        assert first_life is not None
        [rank] = children(first_life)
        client.submit(
            make_request(8, req_id=50, max_tokens=180, ignore_eos=True, arrival_s=time.monotonic())
        )
        outputs.first(50)
        os.kill(rank, signal.SIGKILL)
        end = outputs.end(50)
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
        wait_until(lambda: client.pid not in (None, first_life))
        assert answers(client, outputs) == before
        assert any("rank 1 of 2 was killed by SIGKILL" in line for line in log)
        second_life = client.pid
        assert second_life is not None
        [rank] = children(second_life)
    finally:
        client.close()
    wait_until(lambda: not Path(f"/proc/{rank}").exists())
