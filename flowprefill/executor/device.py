"""Device: where slices run, how large they may be, and how far they are launched ahead.

A CPU runs a slice when it is called. CUDA is asynchronous: launching ahead hides launch cost, and
is also what delays a preemption, so a bounded window of slices is in flight.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Protocol

import torch

from flowprefill.errors import ConfigError
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

    def wait(self) -> None:
        pass


class DeviceEvent(Protocol):
    """The part of torch.cuda.Event that the window uses."""

    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class LaunchWindow:
    """Bounds the predicted work in flight on an asynchronous device. Pure: no torch.

    At most max_slice of work is in flight when a slice is launched, so in flight <= max_slice + one
    slice; at least one slice stays in flight while launching goes on, so the device has work.
    """

    def __init__(self, max_slice_s: float) -> None:
        self._max_slice_s = max_slice_s
        self._in_flight: deque[tuple[DeviceEvent, float]] = deque()

    @property
    def in_flight_s(self) -> float:
        """Predicted seconds of the slices not known to have ended."""
        return sum(seconds for _, seconds in self._in_flight)

    def make_room(self) -> None:
        """Forget slices that have ended; wait for the oldest ones while too much is in flight."""
        while self._in_flight and self._in_flight[0][0].query():
            self._in_flight.popleft()
        while len(self._in_flight) > 1 and self.in_flight_s > self._max_slice_s:
            self._in_flight.popleft()[0].synchronize()

    def launched(self, event: DeviceEvent, predicted_s: float) -> None:
        """Note a slice whose end `event` marks."""
        self._in_flight.append((event, predicted_s))

    def wait(self) -> None:
        """Wait for everything in flight."""
        while self._in_flight:
            self._in_flight.popleft()[0].synchronize()


def fix_products() -> None:
    """Have cuBLAS give a product the same bits each time; before the first one.

    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # parts of a sum stay fp32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class CudaDevice:
    """One compute stream, slices launched ahead within a LaunchWindow."""

    _LINEAR_FLOPS = 300e12
    _ATTENTION_FLOPS = 100e12
    _BYTES_PER_S = 2e12
    default_dtype = torch.bfloat16
    num_threads = 1

    def __init__(self, max_slice_s: float, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("model.json: device='cuda': torch finds no CUDA device")
        fix_products()
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch_device)
        self._window = LaunchWindow(max_slice_s)
        self.use_in_this_thread()

    def use_in_this_thread(self) -> None:
        # Everything that the thread launches, a pass's first tensors included, is in one order.
        torch.cuda.set_stream(self._stream)

    def slice_limits(
        self, spec: ModelSpec, dtype: torch.dtype, max_slice_s: float, is_native: bool
    ) -> SliceLimits:
        # half a slice each: two are in flight, and their sum bounds the blocking time
        return SliceLimits.for_device(
            spec,
            max_slice_s / 2,
            self._LINEAR_FLOPS,
            self._ATTENTION_FLOPS,
            self._BYTES_PER_S,
            dtype.itemsize,
            NATIVE_KEY_TILES if is_native else TORCH_KEY_TILES,
        )

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        self._window.make_room()
        may_leave = run_slice(None)  # one by one, as the window counts them
        event = torch.cuda.Event()
        event.record(self._stream)
        self._window.launched(event, profiled_s)
        return may_leave

    def wait(self) -> None:
        self._window.wait()


def make_device(name: str, max_slice_s: float, num_threads: int | None) -> Device:
    """Device of model.json's `device`. Raises ConfigError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return CudaDevice(max_slice_s) if name == "cuda" else CpuDevice(num_threads)
