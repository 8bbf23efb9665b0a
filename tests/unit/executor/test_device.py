"""The launch window against a recorded device in virtual time; what CpuDevice chooses."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowprefill.clock import VirtualClock
from flowprefill.errors import ConfigError
from flowprefill.executor.device import (
    CpuDevice,
    CudaDevice,
    LaunchWindow,
    fix_products,
    make_device,
)
from flowprefill.interrupt import Interrupt
from tests.unit.programs.test_slices import make_spec

MAX_SLICE_S = 0.004
SHORTEST_S = 2**-14  # binary fractions add up exactly

durations = st.lists(
    st.integers(1, int(MAX_SLICE_S / SHORTEST_S)).map(lambda n: n * SHORTEST_S),
    min_size=1,
    max_size=60,
)


class FakeStream:
    """A device that runs slices one after another in virtual time."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.free_s: float | None = None
        """When the last launched slice ends; None before the first launch."""
        self.idle_s = 0.0

    @property
    def backlog_s(self) -> float:
        return max(0.0, (self.free_s or 0.0) - self.clock.now_s())

    def launch(self, duration_s: float) -> FakeEvent:
        now_s = self.clock.now_s()
        free_s = now_s if self.free_s is None else self.free_s
        self.idle_s += max(0.0, now_s - free_s)
        self.free_s = max(now_s, free_s) + duration_s
        return FakeEvent(self.clock, self.free_s)


class FakeEvent:
    """The end of one slice. Synchronising is the only thing that takes the host's time."""

    def __init__(self, clock: VirtualClock, end_s: float) -> None:
        self._clock, self._end_s = clock, end_s

    def query(self) -> bool:
        return self._clock.now_s() >= self._end_s

    def synchronize(self) -> None:
        self._clock.advance_to(max(self._clock.now_s(), self._end_s))


def launch_all(
    window: LaunchWindow,
    stream: FakeStream,
    predicted: list[float],
    actual: list[float] | None = None,
    launch_s: float = 0.0,
) -> Iterator[float]:
    """Launch slice after slice; yields each slice's predicted seconds once it is launched."""
    for predicted_s, actual_s in zip(predicted, actual or predicted, strict=True):
        window.make_room()
        stream.clock.advance_to(stream.clock.now_s() + launch_s)
        window.launched(stream.launch(actual_s), predicted_s)
        yield predicted_s


class TestLaunchWindow:
    @given(durations)
    def test_at_most_max_slice_and_one_slice_are_in_flight(self, slices: list[float]) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for slice_s in launch_all(window, stream, slices):
            assert window.in_flight_s <= MAX_SLICE_S + slice_s
            # what a newcomer waits for
            assert stream.backlog_s <= MAX_SLICE_S + slice_s

    @given(durations, st.sampled_from([0.25, 0.5, 2.0, 4.0]))
    def test_wrong_predictions_scale_the_backlog_and_no_more(
        self, slices: list[float], factor: float
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        actual = [factor * s for s in slices]
        for slice_s in launch_all(window, stream, slices, actual):
            assert window.in_flight_s <= MAX_SLICE_S + slice_s
            assert stream.backlog_s <= factor * (MAX_SLICE_S + slice_s)

    @given(durations)
    def test_device_never_idles_while_launches_are_instant(self, slices: list[float]) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, slices):
            assert stream.idle_s == 0
        assert stream.free_s == sum(slices)

    @given(durations)
    def test_device_never_idles_while_launches_are_faster_than_slices(
        self, slices: list[float]
    ) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, slices, launch_s=SHORTEST_S):
            assert stream.idle_s == 0

    @given(durations, st.integers(2, 10))
    def test_slices_over_max_slice_go_out_two_at_a_time(
        self, slices: list[float], factor: int
    ) -> None:
        long = [s * factor + MAX_SLICE_S for s in slices]
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        previous = 0.0
        for slice_s in launch_all(window, stream, long):
            assert window.in_flight_s <= previous + slice_s
            assert stream.idle_s == 0
            previous = slice_s

    @given(durations)
    def test_wait_returns_when_everything_has_run(self, slices: list[float]) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, slices):
            pass
        window.wait()
        assert window.in_flight_s == 0
        assert stream.clock.now_s() == stream.free_s == sum(slices)

    def test_ended_slices_are_forgotten_without_waiting(self) -> None:
        window, stream = LaunchWindow(MAX_SLICE_S), FakeStream()
        for _ in launch_all(window, stream, [0.002, 0.002]):
            pass
        stream.clock.advance_to(0.003)
        window.make_room()
        assert window.in_flight_s == 0.002 and stream.clock.now_s() == 0.003


@pytest.fixture
def keep_threads() -> Iterator[None]:
    """CpuDevice sets torch's number of threads for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("keep_threads")
class TestCpuDevice:
    @pytest.mark.parametrize(
        ("avx512", "amx", "dtype"),
        [
            (True, False, torch.bfloat16),
            (False, True, torch.bfloat16),
            (False, False, torch.float32),
        ],
    )
    def test_dtype_is_bf16_only_where_the_processor_multiplies_it(
        self, avx512: bool, amx: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        assert CpuDevice(1).default_dtype == dtype

    def test_threads_are_those_asked_for(self) -> None:
        CpuDevice(1)
        assert torch.get_num_threads() == 1

    @pytest.mark.parametrize("answer", [True, False])
    def test_run_calls_the_slice_once_and_returns_its_answer(self, answer: bool) -> None:
        calls: list[Interrupt | None] = []
        interrupt = Interrupt(VirtualClock())

        def run_slice(interrupt: Interrupt | None) -> bool:
            calls.append(interrupt)
            return answer

        assert CpuDevice(1).run(run_slice, 0.001, interrupt) is answer
        assert calls == [interrupt]

    @pytest.mark.parametrize("is_native", [True, False])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_slices_grow_with_max_slice(self, dtype: torch.dtype, is_native: bool) -> None:
        device = CpuDevice(1)
        short = device.slice_limits(make_spec(), dtype, 0.002, is_native)
        long = device.slice_limits(make_spec(), dtype, 0.008, is_native)
        assert short.tile_rows < long.tile_rows
        assert short.attention_work * 4 == pytest.approx(long.attention_work, abs=4)

    def test_fp32_tiles_have_fewer_rows_than_bf16_tiles(self) -> None:
        device = CpuDevice(1)
        rows = [
            device.slice_limits(make_spec(), dtype, MAX_SLICE_S, True).tile_rows
            for dtype in (torch.float32, torch.bfloat16)
        ]
        assert rows[0] < rows[1]

    def test_more_threads_take_more_rows(self) -> None:
        one, four = (
            CpuDevice(n).slice_limits(make_spec(), torch.bfloat16, MAX_SLICE_S, True)
            for n in (1, 4)
        )
        assert one.tile_rows < four.tile_rows and one.attention_work < four.attention_work


def test_cublas_gets_a_workspace_of_fixed_size_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    fix_products()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    fix_products()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.usefixtures("keep_threads")
class TestMakeDevice:
    def test_cuda_without_a_card_is_refused_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match="device='cuda': torch finds no CUDA device"):
            make_device("cuda", MAX_SLICE_S, None)

    @pytest.mark.parametrize("name", ["auto", "cpu"])
    def test_without_a_card_it_is_the_cpu(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert make_device(name, MAX_SLICE_S, 1).torch_device.type == "cpu"

    @pytest.mark.gpu
    @pytest.mark.parametrize("name", ["auto", "cuda"])
    def test_with_a_card_it_is_the_card(self, name: str) -> None:
        assert isinstance(make_device(name, MAX_SLICE_S, None), CudaDevice)
