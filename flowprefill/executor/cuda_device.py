"""CudaDevice: slices are launched on one stream, within a LaunchWindow. Nothing waits but that.

The host waits at three places: for room in the window, for the end of what ran before when another
pass begins (which says when that pass began), and for the last slice of a pass, whose token it
needs. Each waits for one event; the stream or the device as a whole is never synchronised. All that
goes from host to device meanwhile goes through kv/host_copies.py.

What is launched behind a finished pass? Nothing: the engine's thread waits for the pass it runs, so
its first token leaves as soon as its last slice ends. To launch other work first would hide the
choice of the token, but what that token ends or begins would be decided late.
"""

from __future__ import annotations

import os

import torch

from flowprefill.errors import ConfigError
from flowprefill.executor.launch_window import DeviceEvent, LaunchWindow
from flowprefill.interrupt import Interrupt
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.program import RunSlice
from flowprefill.programs.slices import NATIVE_KEY_TILES, TORCH_KEY_TILES, SliceLimits


def fix_products() -> None:
    """Have cuBLAS give a product the same bits each time; before the first one.

    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # parts of a sum stay fp32
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


class CudaDevice:
    """One compute stream of one card. Implements Device."""

    _LINEAR_FLOPS = 300e12
    _ATTENTION_FLOPS = 100e12
    _BYTES_PER_S = 2e12
    num_threads = 1

    def __init__(self, max_slice_s: float, index: int = 0) -> None:
        """index: of the card. Raises ConfigError if there is none."""
        if not torch.cuda.is_available():
            raise ConfigError("model.json: device='cuda': torch finds no CUDA device")
        fix_products()
        self.torch_device = torch.device("cuda", index)
        # older ones have no instructions for bf16 products
        has_bf16 = torch.cuda.get_device_properties(self.torch_device).major >= 8
        self.default_dtype = torch.bfloat16 if has_bf16 else torch.float32
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
            packs_attention=is_native,
        )

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        may_leave = run_slice(None)  # one by one, as the window counts them
        event = torch.cuda.Event()
        event.record(self._stream)
        self._window.launched(event, profiled_s)
        # Behind the launch, so that whoever arrives while this waits is seen before the next one.
        self._window.make_room()
        return may_leave

    def in_flight(self) -> DeviceEvent | None:
        self._window.forget_ended()
        return self._window.newest

    def wait(self) -> None:
        self._window.wait()
