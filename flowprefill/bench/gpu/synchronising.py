"""A device that waits for its card behind each slice: how preemption is done without a window.

The FlowPrefill authors' code synchronises at each check, behind each operator of the whole prompt.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from flowprefill.bench.gpu.random_model import RandomModel
from flowprefill.bench.prefill_modes import with_whole_operators
from flowprefill.executor.device import Device
from flowprefill.interrupt import Interrupt
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.program import RunSlice
from flowprefill.programs.slices import SliceLimits

if TYPE_CHECKING:
    from flowprefill.executor.launch_window import DeviceEvent


class SynchronisingDevice:
    """Implements Device by another one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.torch_device = device.torch_device
        self.default_dtype = device.default_dtype
        self.num_threads = device.num_threads

    def slice_limits(
        self, spec: ModelSpec, dtype: torch.dtype, max_slice_s: float, is_native: bool
    ) -> SliceLimits:
        return self._device.slice_limits(spec, dtype, max_slice_s, is_native)

    def use_in_this_thread(self) -> None:
        self._device.use_in_this_thread()

    def run(self, run_slice: RunSlice, profiled_s: float, interrupt: Interrupt) -> bool:
        may_leave = self._device.run(run_slice, profiled_s, interrupt)
        if self.torch_device.type == "cuda":
            torch.cuda.current_stream(self.torch_device).synchronize()
        return may_leave

    def in_flight(self) -> DeviceEvent | None:
        return self._device.in_flight()

    def wait(self) -> None:
        self._device.wait()


def with_synchronise_per_operator(random_model: RandomModel, max_tokens: int) -> RandomModel:
    """The same model on such a device, each operator over the whole of prompts up to max_tokens."""
    model = random_model.model
    return dataclasses.replace(
        random_model,
        model=dataclasses.replace(
            model,
            device=SynchronisingDevice(model.device),
            program=with_whole_operators(model.program, max_tokens),
        ),
    )
