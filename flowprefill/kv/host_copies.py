"""Small tensors from the host to the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """An int64 tensor of these values, for what is launched from now on.

    torch.tensor(..., device="cuda") waits until everything launched before has run, and so empties
    the window of slices in flight.
    """
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
