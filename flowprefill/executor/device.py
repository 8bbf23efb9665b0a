"""Device: where slices run, how large they may be, and how far they are launched ahead.

A CPU runs a slice when it is called. CUDA is asynchronous (cuda_device.py).
"""

from __future__ import annotations

from typing import Protocol

import torch

from flowprefill.config import EngineConfig
from flowprefill.executor.cuda_device import CudaDevice
from flowprefill.executor.launch_window import DeviceEvent
from flowprefill.host_cpu import num_cpus
from flowprefill.interrupt import Interrupt
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.program import RunSlice
from flowprefill.programs.slices import NATIVE_KEY_TILES, TORCH_KEY_TILES, SliceLimits


class Device(Protocol):
    """What the engine needs of a device."""

    torch_device: torch.device
    default_dtype: torch.dtype
    num_threads: int
    """Of the host that work on a slice."""

    def slice_limits(
        self, spec: ModelSpec, dtype: torch.dtype, max_slice_s: float, is_native: bool
    ) -> SliceLimits:
        """Rows per slice: constants of model, device class, dtype and kernels.

        is_native: the kernels are our own, not torch's
        """
        ...

    def use_in_this_thread(self) -> None:
        """Call once in a thread before it runs slices: threads and streams are set per thread."""
        ...

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        """Run or launch the next slice; returns what it returns.

        profiled_s: of that slice
        interrupt: handed on where several slices may run in one call
        """
        ...

    def in_flight(self) -> DeviceEvent | None:
        """The end of what was launched so far; None if all of it has run."""
        ...

    def wait(self) -> None:
        """Return when everything launched has run."""
        ...


class CpuDevice:
    """All cores, one slice at a time."""

    # FLOP/s of a thread with AVX512-BF16 (docs/log.md). They set slice sizes only; predictions are
    # measured.
    _LINEAR_FLOPS = {torch.bfloat16: 200e9, torch.float32: 100e9}  # noqa: RUF012
    _NATIVE_ATTENTION_FLOPS = {torch.bfloat16: 160e9, torch.float32: 80e9}  # noqa: RUF012
    _TORCH_ATTENTION_FLOPS = 60e9
    _BYTES_PER_S = 20e9

    def __init__(self, num_threads: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.num_threads = num_threads or num_cpus()
        self.use_in_this_thread()
        # without instructions for bf16 products (AVX512-BF16, AMX), fp32 is faster
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        self.default_dtype = torch.bfloat16 if has_bf16 else torch.float32

    def slice_limits(
        self, spec: ModelSpec, dtype: torch.dtype, max_slice_s: float, is_native: bool
    ) -> SliceLimits:
        attention_flops = self._TORCH_ATTENTION_FLOPS
        if is_native:
            attention_flops = self._NATIVE_ATTENTION_FLOPS[dtype]
        return SliceLimits.for_device(
            spec,
            max_slice_s,
            linear_flops=self.num_threads * self._LINEAR_FLOPS[dtype],
            attention_flops=self.num_threads * attention_flops,
            bytes_per_s=self.num_threads * self._BYTES_PER_S,
            value_bytes=dtype.itemsize,
            key_tiles=NATIVE_KEY_TILES if is_native else TORCH_KEY_TILES,
        )

    def use_in_this_thread(self) -> None:
        torch.set_num_threads(self.num_threads)

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        return run_slice(interrupt)

    def in_flight(self) -> DeviceEvent | None:
        return None

    def wait(self) -> None:
        pass


def model_dtype(config: EngineConfig, device: Device) -> torch.dtype:
    """Of the weights, and of the keys and values."""
    if config.dtype == "auto":
        return device.default_dtype
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def make_device(name: str, max_slice_s: float, num_threads: int | None, index: int = 0) -> Device:
    """Device of model.json's `device`. Raises ConfigError if it is not there.

    index: of the card, on cuda
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return CudaDevice(max_slice_s, index) if name == "cuda" else CpuDevice(num_threads)
