"""What CpuDevice chooses, and which device is made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowprefill import engine_model
from flowprefill.clock import MonotonicClock, VirtualClock
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.executor.cuda_device import CudaDevice, fix_products
from flowprefill.executor.device import CpuDevice, make_device
from flowprefill.executor.device_choice import device_choice, report_choice
from flowprefill.interrupt import Interrupt
from flowprefill.user_cache import user_cache_directory
from tests.factories import TINY_VOCAB_SIZE, write_tiny_model
from tests.unit.executor.streams import PretendedCard
from tests.unit.programs.test_slices import make_spec

MAX_SLICE_S = 0.004


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


@pytest.mark.parametrize(
    ("major", "dtype"), [(7, torch.float32), (8, torch.bfloat16), (10, torch.bfloat16)]
)
def test_dtype_is_bf16_only_where_the_card_multiplies_it(
    major: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    PretendedCard(monkeypatch, major=major)
    assert CudaDevice(MAX_SLICE_S).default_dtype == dtype


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


class TestDeviceChoice:
    """Each test has a vocabulary of its own, as what was found is kept."""

    @pytest.mark.parametrize("own", [None, "/somewhere"])
    def test_compiled_kernels_are_kept_in_the_user_s_cache_unless_told_otherwise(
        self, own: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", own or "")
        if own is None:
            monkeypatch.delenv("TRITON_CACHE_DIR")
        device_choice(torch.device("cuda"), 1001 if own else 1002)
        assert os.environ["TRITON_CACHE_DIR"] == (own or str(user_cache_directory("triton")))

    def test_why_a_card_s_tokens_are_chosen_on_the_host_is_told(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stages: list[str] = []

        def zeros(*shape: int, device: torch.device) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2 MiB")

        monkeypatch.setattr(torch, "zeros", zeros)
        monkeypatch.setenv("TRITON_CACHE_DIR", "/somewhere")
        for name in ("cuda", "cpu"):
            device = torch.device(name)
            assert device_choice(device, 1003) is None
            report_choice(device, 1003, lambda stage, fraction: stages.append(stage))
        reason = "OutOfMemoryError: CUDA out of memory."
        assert stages == [f"no kernel that chooses tokens, the host does: {reason}"]

    @pytest.mark.usefixtures("keep_threads")
    @pytest.mark.parametrize("program", ["native", "hooks"])
    def test_whether_it_runs_is_found_out_while_a_model_loads(
        self, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[tuple[str, int]] = []
        monkeypatch.setattr(
            engine_model,
            "report_choice",
            lambda device, vocab, _: asked.append((str(device), vocab)),
        )
        path = write_tiny_model(tmp_path)
        config = EngineConfig(
            str(path), dtype="float32", device="cpu", num_threads=1, program=program
        )
        engine_model.load_for_engine(config, MonotonicClock(), lambda stage, fraction: None)
        assert asked == [("cpu", TINY_VOCAB_SIZE)]
