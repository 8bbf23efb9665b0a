"""Small tensors between host and device, without waiting for more than they need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """An int64 tensor of these values, for what is launched from now on.

    torch.tensor(..., device="cuda"), or a list as an index of a CUDA tensor, waits until everything
    launched before has run, and so empties the window of slices in flight.
    """
    return _copy(torch.tensor(values, dtype=torch.int64), device)


def floats_to_device(values: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """The same in fp32."""
    return _copy(torch.tensor(values, dtype=torch.float32), device)


def _copy(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Its values on the CPU, once what this thread has launched so far has run.

    Through pinned memory, which is quicker, and waiting for the copy alone.
    """
    if tensor.device.type != "cuda":
        return tensor.to("cpu")
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    copied.synchronize()
    return copy
