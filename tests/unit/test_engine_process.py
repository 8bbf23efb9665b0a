"""EngineClient: an engine in a child process, killed, wedged and closed in all ways.

The stand-in engine serves what a real one does not do by itself; the real one is at the end.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flowprefill.config import EngineConfig
from flowprefill.engine_process import EngineClient, EngineState
from flowprefill.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    QueueFullError,
    UnavailableError,
)
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.stats import EngineInfo
from flowprefill.supervision import Supervision
from flowprefill.timeline import DeviceRun
from tests import stand_in_engine
from tests.factories import make_request

STAND_IN = "tests.stand_in_engine:StandInEngine"
QUICK_RESTART = Supervision(backoff_s=0.05, max_deaths=1000)
QUICK_WEDGE = Supervision(ping_s=0.1, min_wedge_s=0.5, backoff_s=0.05)
WAIT_S = 10.0
LONGER_THAN_TESTS_S = 600.0
ENDLESS = 1_000_000


class Harness:
    """A client and everything that came out of it."""

    def __init__(
        self,
        model: str = "ok",
        supervision: Supervision = QUICK_RESTART,
        engine_factory: str = STAND_IN,
        **config: Any,
    ) -> None:
        self.changed = threading.Condition()
        self.outputs: dict[int, list[TokenOutput]] = defaultdict(list)
        self.log: list[str] = []
        self.progress: list[tuple[str, float]] = []
        self.client = EngineClient(
            EngineConfig(model=model, device="cpu", **{"queue_timeout_ms": 5000.0, **config}),
            self._on_output,
            self._on_log,
            engine_factory=engine_factory,
            supervision=supervision,
        )

    def start(self) -> Harness:
        self.client.start(lambda stage, fraction: self.progress.append((stage, fraction)))
        return self

    def _on_output(self, output: TokenOutput) -> None:
        with self.changed:
            self.outputs[output.req_id].append(output)
            self.changed.notify_all()

    def _on_log(self, line: str) -> None:
        with self.changed:
            self.log.append(line)
            self.changed.notify_all()

    def submit(self, req_id: int, first_token: int = 10, max_tokens: int = 5) -> None:
        self.client.submit(counting_request(req_id, first_token, max_tokens))

    def wait(self, condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        with self.changed:
            while not condition():
                # state changes do not notify: look again at a coarse interval as well
                self.changed.wait(0.02)
                assert time.monotonic() < deadline_s, f"not in {timeout_s} s; log: {self.log}"

    def wait_state(self, state: EngineState) -> None:
        self.wait(lambda: self.client.state is state)

    def tokens(self, req_id: int) -> list[int | None]:
        return [output.token_id for output in self.outputs[req_id]]

    def end(self, req_id: int, timeout_s: float = WAIT_S) -> TokenOutput:
        """The request's last output, once it has come."""
        self.wait(lambda: self.ends(req_id), timeout_s)
        return self.outputs[req_id][-1]

    def ends(self, req_id: int) -> list[TokenOutput]:
        return [output for output in self.outputs[req_id] if output.finish_reason]

    def kill(self) -> int:
        pid = self.client.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(*args: object, **kwargs: object) -> Harness:
        made.append(Harness(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.client.close()


def counting_request(req_id: int, first_token: int = 10, max_tokens: int = 5) -> Request:
    sampling = {"max_tokens": max_tokens, "logit_bias": {3: 1.0}}
    request = make_request(1, req_id=req_id, arrival_s=time.monotonic(), **sampling)
    request.prompt_token_ids[0] = first_token
    return request


def is_running(pid: int) -> bool:
    """True also for a zombie: it was not reaped."""
    return Path(f"/proc/{pid}").exists()


# ---- calls pass through ----


def test_requests_stream_their_tokens_and_end_once(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    for req_id in range(20):
        h.submit(req_id, first_token=100 * req_id, max_tokens=7)
    for req_id in range(20):
        assert h.end(req_id).finish_reason is FinishReason.LENGTH
        assert h.tokens(req_id) == [100 * req_id + i for i in range(1, 8)]
        assert len(h.ends(req_id)) == 1


def test_start_reports_progress_and_info(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    assert h.progress == [("weights", 0.5)]
    assert h.client.info.architecture == "stand-in"
    assert h.client.state is EngineState.READY
    assert h.client.is_healthy


def test_cancel_ends_a_stream_with_cancelled(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1, max_tokens=ENDLESS)
    h.wait(lambda: h.outputs[1])
    h.client.cancel(1)
    assert h.end(1).finish_reason is FinishReason.CANCELLED


def test_stats_come_from_the_engine(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1, max_tokens=ENDLESS)
    h.wait(lambda: h.outputs[1])
    assert h.client.stats().num_decoding == 1


def test_a_timeline_comes_from_the_engine(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    for goes_on in (True, False):
        (wire,), is_full = h.client.take_timeline(goes_on)
        assert DeviceRun.from_wire(wire) == DeviceRun(None, (1,), 1.0, 2.0, goes_on)
        assert not is_full


def test_stats_are_answered_while_the_engine_thread_is_stuck(
    harness: Callable[..., Harness],
) -> None:
    h = harness(supervision=Supervision()).start()
    h.submit(1, stand_in_engine.SLEEP_FOR_EVER)
    assert h.client.stats().num_decoding == 0
    h.kill()  # spares the close its grace time


def test_a_request_the_engine_refuses_ends_with_its_error_and_harms_no_other(
    harness: Callable[..., Harness],
) -> None:
    h = harness().start()
    h.submit(1, max_tokens=300)
    h.submit(2, stand_in_engine.TOO_LONG)
    h.submit(3, stand_in_engine.BUG_IN_SUBMIT)
    refused, broken = h.end(2), h.end(3)
    assert (refused.error_code, refused.error_message) == (
        "INVALID_ARG",
        "101 tokens > max_model_len 100",
    )
    assert (broken.error_code, broken.error_message) == ("INTERNAL", "KeyError: 'bug'")
    assert (refused.reject_reason, broken.reject_reason) == ("invalid", None)
    assert h.end(1).finish_reason is FinishReason.LENGTH
    assert len(h.outputs[1]) == 300


def test_a_request_the_engine_process_cannot_read_ends_alone(
    harness: Callable[..., Harness],
) -> None:
    h = harness().start()
    pid = h.client.pid
    h.submit(1, max_tokens=300)
    request = counting_request(2)
    object.__setattr__(request.slo, "ttft_s", -1.0)  # past the checks of this side
    h.client.submit(request)
    refused = h.end(2)
    assert refused.error_code == "INVALID_ARG" and "ttft_slo_ms" in str(refused.error_message)
    assert h.end(1).finish_reason is FinishReason.LENGTH
    assert h.client.pid == pid


def test_what_no_message_can_hold_is_refused_at_submit(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    with pytest.raises(InvalidRequestError):
        h.submit(1, first_token=2**70)
    h.submit(2)
    assert h.end(2).finish_reason is FinishReason.LENGTH


def test_a_slow_receiver_does_not_hold_up_the_engine(harness: Callable[..., Harness]) -> None:
    h = harness(supervision=Supervision()).start()
    with h.changed:  # on_output blocks on this lock; more piles up than a socket holds
        for req_id in range(100):
            h.submit(req_id, max_tokens=150)
        pid = h.client.pid
        assert pid is not None
        wait_until_idle(pid)
        released_s = time.monotonic()
    for req_id in range(100):
        assert h.end(req_id).token_s < released_s
        assert len(h.outputs[req_id]) == 150


def wait_until_idle(pid: int) -> None:
    """Until the process used no CPU time for a while."""
    used, since_s = -1, time.monotonic()
    deadline_s = since_s + 2 * WAIT_S
    while time.monotonic() - since_s < 0.3:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        now_used = int(fields[11]) + int(fields[12])
        if now_used != used:
            used, since_s = now_used, time.monotonic()
        time.sleep(0.02)
        assert time.monotonic() < deadline_s


def test_what_the_engine_prints_is_logged(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1, stand_in_engine.PRINT)
    h.wait(lambda: "hello from the engine" in h.log)


def test_an_error_in_on_output_does_not_end_supervision(harness: Callable[..., Harness]) -> None:
    h = harness()
    receive, errors = h.client._on_output, iter([ValueError("receiver's bug")])

    def fail_once(output: TokenOutput) -> None:
        for error in errors:
            raise error
        receive(output)

    h.client._on_output = fail_once
    h.start()
    h.submit(1)
    assert h.end(1).finish_reason is FinishReason.LENGTH
    assert any("receiver's bug" in line for line in h.log)


# ---- load failures ----


def test_a_config_error_in_the_engine_is_raised_by_start(harness: Callable[..., Harness]) -> None:
    h = harness("config-error")
    with pytest.raises(ConfigError, match=r"^model\.json: policy='x'$"):
        h.start()
    assert h.client.state is EngineState.FAILED
    assert h.client.pid is None
    with pytest.raises(UnavailableError, match="policy='x'"):
        h.submit(1)


def test_any_other_load_error_is_a_model_load_error(harness: Callable[..., Harness]) -> None:
    h = harness("os-error")
    with pytest.raises(ModelLoadError, match="OSError: disk on fire"):
        h.start()
    assert any(line.startswith("Traceback") for line in h.log)


def test_a_death_while_loading_is_a_model_load_error(harness: Callable[..., Harness]) -> None:
    with pytest.raises(ModelLoadError, match="was killed by SIGKILL while it loaded"):
        harness("killed").start()


def test_close_ends_a_hanging_load(harness: Callable[..., Harness]) -> None:
    h = harness("hang")
    failures: list[BaseException] = []

    def start() -> None:
        try:
            h.start()
        except UnavailableError as error:
            failures.append(error)

    starter = threading.Thread(target=start)
    starter.start()
    h.wait(lambda: h.progress)
    pid = h.client.pid
    h.client.close()
    starter.join(WAIT_S)
    assert str(failures[0]) == "the engine was closed"
    assert pid is not None and not is_running(pid)


# ---- death and restart ----


def test_sigkill_ends_every_live_request_and_the_engine_comes_back(
    harness: Callable[..., Harness],
) -> None:
    h = harness().start()
    for req_id in range(5):
        h.submit(req_id, max_tokens=ENDLESS)
    h.wait(lambda: all(h.outputs[req_id] for req_id in range(5)))
    killed = h.kill()
    for req_id in range(5):
        end = h.end(req_id)
        assert (end.finish_reason, end.error_code) == (FinishReason.ERROR, "UNAVAILABLE")
        assert end.reject_reason is None, "it was in the engine"
        assert end.error_message == f"engine process {killed} was killed by SIGKILL"
    h.submit(9)  # during the restart: held
    assert h.end(9).finish_reason is FinishReason.LENGTH
    assert h.client.pid != killed
    assert not is_running(killed)
    assert h.client.num_restarts == 1


def test_a_crash_leaves_its_traceback_in_the_log(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1, stand_in_engine.CRASH)
    assert "was killed by SIGSEGV" in str(h.end(1).error_message)
    assert any("Fatal Python error: Segmentation fault" in line for line in h.log)
    assert any("in misbehave" in line for line in h.log)


def test_an_engine_whose_thread_ended_does_not_stay_up(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1, stand_in_engine.RAISE)
    assert "exited with code 1" in str(h.end(1).error_message)
    assert any("engine thread fell over" in line for line in h.log)
    assert any(line.endswith("fell over; 1 requests lost") for line in h.log)


@pytest.fixture
def restarting(
    harness: Callable[..., Harness], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Harness]:
    """An engine whose second load waits until the file `gate` is gone. Parameter: how long requests
    may wait for it."""
    gate = tmp_path / "gate"
    queue_timeout_s = getattr(request, "param", LONGER_THAN_TESTS_S)
    h = harness(f"second-waits:{gate}", queue_timeout_ms=1000.0 * queue_timeout_s).start()
    h.kill()
    h.wait_state(EngineState.RESTARTING)
    yield h
    gate.unlink(missing_ok=True)


@pytest.mark.parametrize("restarting", [0.3], indirect=True)
def test_requests_during_a_restart_wait_for_the_queue_timeout(restarting: Harness) -> None:
    h = restarting
    start_s = time.monotonic()
    assert not h.client.is_healthy
    h.submit(1)
    end = h.end(1)
    assert time.monotonic() - start_s >= 0.3
    assert (end.error_code, end.reject_reason) == ("UNAVAILABLE", "queue_timeout")
    message = str(end.error_message)
    assert message.startswith("the request waited queue_timeout_ms=300 for the engine: engine proc")
    assert "was killed by SIGKILL; the engine restarts" in message


def test_what_waits_for_a_restart_is_bounded_as_the_queue_is(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    h = harness(f"second-waits:{gate}", max_waiting_requests=3).start()
    h.kill()
    h.wait_state(EngineState.RESTARTING)
    for req_id in range(3):
        h.submit(req_id)
    with pytest.raises(
        QueueFullError, match=r"the queue is full \(max_waiting_requests=3\): 3 req"
    ):
        h.submit(3)
    h.client.cancel(0)
    assert h.end(0).finish_reason is FinishReason.CANCELLED
    h.submit(4)
    gate.unlink()
    for req_id in (1, 2, 4):
        assert h.end(req_id).finish_reason is FinishReason.LENGTH


def test_a_held_request_that_waited_before_waits_as_much_less(restarting: Harness) -> None:
    restarting.submit(1)
    request = counting_request(2)
    arrival_s = request.arrival_s - LONGER_THAN_TESTS_S  # in a parser's queue
    object.__setattr__(request, "arrival_s", arrival_s)
    restarting.client.submit(request)
    assert restarting.end(2).reject_reason == "queue_timeout"
    assert not restarting.ends(1)


def test_a_restart_that_hangs_while_it_loads_is_ended(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    limits = Supervision(backoff_s=0.01, max_deaths=1000, min_reload_s=0.0, reload_factor=3.0)
    h = harness(f"second-waits:{gate}", supervision=limits).start()
    h.kill()
    h.wait(lambda: any("did not load within" in line for line in h.log))
    h.wait(lambda: any("in load" in line for line in h.log))  # where it stood
    gate.unlink()
    h.wait_state(EngineState.READY)


def test_a_held_request_can_be_cancelled(restarting: Harness) -> None:
    restarting.submit(1)
    restarting.client.cancel(1)
    assert restarting.end(1).finish_reason is FinishReason.CANCELLED


def test_a_cancel_is_not_lost_while_held_requests_are_handed_over(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    h = harness(f"second-waits:{gate}").start()
    h.kill()
    h.wait_state(EngineState.RESTARTING)
    h.submit(1)
    h.submit(2, max_tokens=ENDLESS)
    on_ready, on_output = h.client._on_ready, h.client._on_output

    def cancel_first(info: EngineInfo) -> None:  # at the last moment, so that its end is delivered
        h.client.cancel(1)  # while the others are handed over
        on_ready(info)

    def cancel_second(output: TokenOutput) -> None:
        if output.req_id == 1:
            h.client.cancel(2)
        on_output(output)

    h.client._on_ready, h.client._on_output = cancel_first, cancel_second
    gate.unlink()
    assert h.end(1).finish_reason is FinishReason.CANCELLED
    assert h.end(2).finish_reason is FinishReason.CANCELLED


def test_close_during_a_restart_ends_held_requests(restarting: Harness) -> None:
    restarting.submit(1)
    restarting.client.close()
    end = restarting.ends(1)[0]
    assert (end.error_code, end.reject_reason) == ("UNAVAILABLE", "unavailable")
    assert restarting.client.state is EngineState.CLOSED


def test_stats_are_unavailable_during_a_restart(restarting: Harness) -> None:
    with pytest.raises(UnavailableError, match="the engine restarts"):
        restarting.client.stats()


def test_five_deaths_end_the_restarts(harness: Callable[..., Harness]) -> None:
    h = harness(supervision=Supervision(backoff_s=0.01)).start()
    for death in range(5):
        h.wait_state(EngineState.READY)
        h.submit(death, first_token=10 * death, max_tokens=ENDLESS)  # nobody comes again
        h.wait(lambda death=death: h.outputs[death])
        h.kill()
        h.end(death)
    h.wait_state(EngineState.FAILED)
    assert not h.client.is_healthy
    with pytest.raises(UnavailableError, match=r"died too often; last: .* killed by SIGKILL"):
        h.submit(9)
    assert h.client.pid is None


def test_a_reload_that_fails_counts_as_a_death(
    harness: Callable[..., Harness], tmp_path: Path
) -> None:
    limits = Supervision(backoff_s=0.01, max_deaths=3)
    h = harness(f"once:{tmp_path / 'loaded'}", supervision=limits).start()
    h.kill()
    h.wait_state(EngineState.RESTARTING)
    h.submit(1)
    end = h.end(1)
    assert "FileExistsError" in str(end.error_message)
    assert end.reject_reason == "unavailable"
    h.wait_state(EngineState.FAILED)


def test_every_request_ends_exactly_once_under_random_kills(
    harness: Callable[..., Harness],
) -> None:
    h = harness().start()
    draw = random.Random(5)
    stop = threading.Event()

    def keep_killing() -> None:
        while not stop.wait(draw.uniform(0.05, 0.4)):
            pid = h.client.pid
            if pid:
                os.kill(pid, draw.choice([signal.SIGKILL, signal.SIGSEGV]))

    killer = threading.Thread(target=keep_killing)
    killer.start()
    try:
        for req_id in range(150):
            # Prompts differ, or they would soon be refused for having been in two deaths.
            h.submit(req_id, 1000 + req_id, max_tokens=draw.choice([1, 20, 200]))
            if draw.random() < 0.2:
                h.client.cancel(req_id - draw.randrange(3))
            time.sleep(0.01)
    finally:
        stop.set()
        killer.join()
    for req_id in range(150):
        h.end(req_id)
    h.wait_state(EngineState.READY)
    h.submit(1000)
    h.end(1000)
    reasons = {h.outputs[req_id][-1].finish_reason for req_id in range(150)}
    assert {FinishReason.LENGTH, FinishReason.ERROR, FinishReason.CANCELLED} <= reasons
    for req_id in range(150):
        assert len(h.ends(req_id)) == 1, req_id
        assert h.outputs[req_id][-1].finish_reason


# ---- wedge ----


@pytest.mark.parametrize("kind", ["SLEEP_FOR_EVER", "HOLD_THE_GIL"])
def test_a_wedged_engine_is_killed_with_its_stacks_logged(
    harness: Callable[..., Harness], kind: str
) -> None:
    h = harness(supervision=QUICK_WEDGE).start()
    wedged = h.client.pid
    h.submit(1, getattr(stand_in_engine, kind))
    assert f"engine process {wedged} made no progress for" in str(h.end(1).error_message)
    assert any("in misbehave" in line for line in h.log)
    h.submit(2)
    assert h.end(2).finish_reason is FinishReason.LENGTH


def test_a_stopped_engine_is_killed(harness: Callable[..., Harness]) -> None:
    h = harness(supervision=QUICK_WEDGE).start()
    assert h.client.pid
    os.kill(h.client.pid, signal.SIGSTOP)
    for req_id in range(3):  # more than the socket holds: submit must not block
        h.client.submit(make_request(200_000, req_id=req_id))
    for req_id in range(3):
        assert "no progress" in str(h.end(req_id).error_message)


def test_a_busy_engine_is_not_taken_for_wedged(harness: Callable[..., Harness]) -> None:
    h = harness(supervision=QUICK_WEDGE).start()
    pid = h.client.pid
    h.submit(1, max_tokens=500)  # > 1 s, twice the limit
    assert h.end(1).finish_reason is FinishReason.LENGTH
    assert h.client.pid == pid


def test_a_slice_that_is_predicted_to_be_long_is_no_wedge(harness: Callable[..., Harness]) -> None:
    h = harness(supervision=QUICK_WEDGE).start()
    pid = h.client.pid
    h.submit(1, stand_in_engine.LONG_SLICE)  # three times the limit
    assert h.end(1).finish_reason is FinishReason.LENGTH
    assert h.client.pid == pid


def test_a_process_that_outlives_its_engine_is_ended(harness: Callable[..., Harness]) -> None:
    """Whatever is asked of it meanwhile: each request is answered that the engine is dead."""
    h = harness(supervision=QUICK_WEDGE).start()
    hanging = h.client.pid
    h.submit(1, stand_in_engine.RAISE_AND_HANG)
    more = itertools.count(2)
    h.wait(lambda: h.ends(1) or h.submit(next(more)))
    assert f"engine process {hanging} made no progress for" in str(h.end(1).error_message)
    assert "the stand-in failed: engine thread fell over" in str(h.end(1).error_message)
    h.submit(1000)
    assert h.end(1000).finish_reason is FinishReason.LENGTH


def test_refusals_do_not_pass_for_progress(harness: Callable[..., Harness]) -> None:
    h = harness(supervision=QUICK_WEDGE).start()
    h.submit(1, stand_in_engine.SLEEP_FOR_EVER)
    more = itertools.count(2)
    h.wait(lambda: h.ends(1) or h.submit(next(more), stand_in_engine.TOO_LONG))
    assert "made no progress for" in str(h.end(1).error_message)


def test_an_idle_engine_is_left_asleep(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1)
    h.end(1)
    assert h.client._timeout_s(time.monotonic()) is None


# ---- close ----


def test_close_drains_then_cancels(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    pid = h.client.pid
    h.submit(1, max_tokens=100)
    h.submit(2, max_tokens=ENDLESS)
    h.wait(lambda: h.outputs[2])
    h.client.close(drain_s=1.0)
    assert h.ends(1)[0].finish_reason is FinishReason.LENGTH
    assert h.ends(2)[0].finish_reason is FinishReason.CANCELLED
    assert h.client.state is EngineState.CLOSED
    assert pid and not is_running(pid)


def test_close_refuses_new_requests_at_once(harness: Callable[..., Harness]) -> None:
    h = harness().start()
    h.submit(1, max_tokens=ENDLESS)
    h.wait(lambda: h.outputs[1])
    closer = threading.Thread(target=h.client.close, args=(0.5,))
    closer.start()
    h.wait(lambda: not h.client.is_healthy)
    with pytest.raises(UnavailableError, match="shutting down"):
        h.submit(2)
    closer.join()


def test_close_of_an_engine_that_does_not_answer_is_bounded(
    harness: Callable[..., Harness],
) -> None:
    h = harness(supervision=Supervision()).start()
    pid = h.client.pid
    h.submit(1, stand_in_engine.SLEEP_FOR_EVER)
    start_s = time.monotonic()
    h.client.close()
    assert time.monotonic() - start_s < 2 * WAIT_S
    assert h.ends(1)[0].error_code == "UNAVAILABLE"
    assert pid and not is_running(pid)


def test_close_may_be_repeated_and_called_from_anywhere(harness: Callable[..., Harness]) -> None:
    h = harness()
    receive = h.client._on_output

    def close_from_callback(output: TokenOutput) -> None:
        receive(output)
        h.client.close()

    h.client._on_output = close_from_callback
    h.start()
    pid = h.client.pid
    h.submit(1, max_tokens=ENDLESS)
    h.end(1)
    closers = [threading.Thread(target=h.client.close) for _ in range(3)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(WAIT_S)
    assert h.client.state is EngineState.CLOSED
    assert pid and not is_running(pid)


def test_close_without_start_and_start_after_close(harness: Callable[..., Harness]) -> None:
    h = harness()
    h.client.close()
    with pytest.raises(UnavailableError):
        h.start()


# ---- orphans ----

PARENT = """
import sys, time
from flowprefill.config import EngineConfig
from flowprefill.engine_process import EngineClient
from tests.unit.test_engine_process import counting_request
config = EngineConfig(model="ok", device="cpu")
client = EngineClient(config, lambda o: None, lambda l: None, engine_factory={factory!r})
client.start()
client.submit(counting_request(1, {first_token}, 10**6))
print(client.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("first_token", [10, stand_in_engine.HOLD_THE_GIL])
def test_the_engine_ends_with_a_parent_that_was_killed(first_token: int) -> None:
    program = PARENT.format(factory=STAND_IN, first_token=first_token)
    command = [sys.executable, "-c", program]
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    deadline_s = time.monotonic() + WAIT_S
    while is_running(pid) and not is_zombie(pid):
        assert time.monotonic() < deadline_s, "the engine outlived its parent"
        time.sleep(0.01)


def is_zombie(pid: int) -> bool:
    """An orphan's remains are the init process's to reap, which may take its time."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def test_a_signal_to_the_process_group_leaves_the_engine_to_its_parent(
    harness: Callable[..., Harness],
) -> None:
    h = harness().start()
    pid = h.client.pid
    assert pid
    h.submit(1, max_tokens=50)
    os.kill(pid, signal.SIGINT)
    os.kill(pid, signal.SIGTERM)
    assert h.end(1).finish_reason is FinishReason.LENGTH
    assert h.client.pid == pid


def test_engine_threads_step_back_and_message_threads_do_not(
    harness: Callable[..., Harness],
) -> None:
    h = harness().start()
    tasks = Path(f"/proc/{h.client.pid}/task")
    niceness = [os.getpriority(os.PRIO_PROCESS, int(task.name)) for task in tasks.iterdir()]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    theirs = min(ours + 5, 19)
    assert sorted(niceness) == [ours, ours, theirs, theirs]  # reader, sender; main, engine
