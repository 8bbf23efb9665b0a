"""Recorder: the timeline of a real engine says what it did, and changes nothing of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowprefill.bench.plots.chrome_trace import chrome_trace
from flowprefill.bench.session import Session
from flowprefill.clock import MonotonicClock
from flowprefill.config import EngineConfig
from flowprefill.programs.slices import SliceLimits
from flowprefill.recorder import Recorder
from flowprefill.request import SLO
from flowprefill.timeline import DeviceRun, preempted
from tests.engine_harness import patient, running, urgent
from tests.factories import write_tiny_model
from tests.native_kernels import KERNELS, require_native
from tests.unit.plots.test_chrome_trace import check_device_does_one_thing, check_valid

NUM_LAYERS = 3
NUM_GROUPS = 3 * (NUM_LAYERS - 1) + 2
"""Of a short prefill: its last layer is a qkv and a head."""


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(MonotonicClock())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=NUM_LAYERS)


def test_a_preempted_prefill_is_two_runs_around_the_urgent_one(
    model: Path, recorder: Recorder
) -> None:
    with running(model) as h:
        h.engine.record(recorder)
        h.at_slice(4, lambda: h.submit(urgent(2, max_tokens=1)))
        h.submit(patient(1, max_tokens=3))
        h.play()
    prefills = [run for run in recorder.runs if run.task_id is not None]
    assert [(run.req_ids, run.is_done) for run in prefills] == [
        ((1,), False),
        ((2,), True),
        ((1,), True),
    ]
    assert prefills[0].task_id == prefills[2].task_id != prefills[1].task_id
    assert preempted(recorder.runs) == [prefills[0]]
    steps = [run for run in recorder.runs if run.task_id is None]
    assert [(run.req_ids, run.is_done) for run in steps] == [((1,), True)] * 2
    tracks = check_valid(chrome_trace(recorder.runs, recorder.spans, {}))
    check_device_does_one_thing(tracks)


def test_spans_are_the_requests_up_to_their_first_token(model: Path, recorder: Recorder) -> None:
    with running(model) as h:
        h.engine.record(recorder)
        request = urgent(7, prompt_len=30, max_tokens=3)
        h.submit(request)
        h.play()
        first = h.of(7)[0]
    (span,) = recorder.spans
    assert (span.req_id, span.num_tokens, span.is_on_time) == (7, 30, True)
    assert span.first_token_s == first.token_s
    assert span.deadline_s - span.arrival_s == pytest.approx(request.slo.ttft_s)
    assert span.arrival_s <= recorder.runs[0].start_s < recorder.runs[0].end_s <= first.token_s


def test_nothing_is_noted_without_it_and_answers_are_the_same(
    model: Path, recorder: Recorder
) -> None:
    with running(model, enable_prefix_caching=False) as h:
        h.submit(patient(1))
        h.play()
        h.engine.record(recorder)
        h.submit(replace(patient(1), req_id=2))
        h.play()
        h.engine.record(None)
        h.submit(replace(patient(1), req_id=3))
        h.play()
        assert h.answer(1) == h.answer(2) == h.answer(3)
    assert {req_id for run in recorder.runs for req_id in run.req_ids} == {2}
    assert [span.req_id for span in recorder.spans] == [2]


@pytest.mark.parametrize("kernels", KERNELS)
def test_groups_are_those_of_the_plan_within_their_run(
    model: Path, recorder: Recorder, kernels: str
) -> None:
    """Calls of a native kernel run several slices, calls of the others one."""
    if kernels == "native":
        require_native("float32")
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", kernels=kernels, num_threads=1
    )
    with Session(config, 0, lambda stage, fraction: None) as session:
        session.engine._model.program.limits = SliceLimits(512, 64 * 64, mlp_rows=64)
        session.engine.record(recorder)
        start_s = time.monotonic()
        answer = session.submit(session.random_prompt(380), SLO(100.0, 100.0))
        session.wait_end(answer)
    (run,) = recorder.runs
    layer = ["qkv", "attention", "mlp"]
    names = [group.name for group in run.slices]
    assert names == [*layer * (NUM_LAYERS - 1), "qkv", "head"]
    mlp = run.slices[2]
    assert (mlp.end_s - mlp.start_s) / mlp.slice_s == pytest.approx(6)  # 380 rows by 64
    edges = [start_s, run.start_s]
    for group in run.slices:
        edges += [group.start_s, group.end_s]
    edges.append(run.end_s)
    assert all(a <= b for a, b in itertools.pairwise(edges))


def test_recording_begins_at_a_boundary_of_what_runs(model: Path, recorder: Recorder) -> None:
    with running(model) as h:
        h.at_slice(4, lambda: h.engine.record(recorder))
        h.submit(patient(1, max_tokens=1))
        h.play()
    (run,) = recorder.runs
    assert (run.req_ids, run.is_done) == ((1,), True)
    assert 0 < len(run.slices) < NUM_GROUPS  # its beginning was not recorded


def test_a_timeline_is_taken_in_parts_that_add_up(model: Path) -> None:
    taken: list[DeviceRun] = []

    def take(goes_on: bool) -> None:
        runs, is_full = h.engine.take_timeline(goes_on)
        assert not is_full
        taken.extend(runs)

    with running(model) as h:
        take(True)
        assert not taken
        h.at_slice(4, lambda: h.submit(urgent(2, max_tokens=1)))
        h.at_slice(11, lambda: take(True))
        h.submit(patient(1, max_tokens=1))
        h.play()
        num_before = len(taken)
        take(False)
        h.submit(patient(3))
        h.play()
        take(False)
    assert 0 < num_before < len(taken)
    assert [(run.req_ids, run.is_done) for run in taken] == [
        ((1,), False),
        ((2,), True),
        ((1,), True),
    ]


def test_the_end_of_a_recording_has_what_ran_of_the_stretch_in_progress(model: Path) -> None:
    ends: list[list[DeviceRun]] = []
    with running(model) as h:
        h.engine.take_timeline(True)
        h.at_slice(4, lambda: ends.append(h.engine.take_timeline(False)[0]))
        h.submit(patient(1, max_tokens=1))
        h.play()
    ((run,),) = ends
    assert (run.req_ids, run.is_done) == ((1,), False)
    assert run.slices and run.start_s == run.slices[0].start_s and run.end_s == run.slices[-1].end_s


def test_a_full_recorder_says_so_and_notes_no_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowprefill.recorder.MAX_RECORDS", 3)
    with running(model) as h:
        h.engine.take_timeline(True)
        for req_id in (1, 2, 3):
            h.submit(patient(req_id))
            h.end(req_id)
        runs, is_full = h.engine.take_timeline(True)
        assert is_full and [run.req_ids for run in runs] == [(1,)]
        assert h.engine.take_timeline(False) == ([], True)
        assert h.engine.take_timeline(True) == ([], False)  # a new one
        h.submit(patient(4))
        h.end(4)
        runs, _ = h.engine.take_timeline(False)
        assert [run.req_ids for run in runs] == [(4,)]
