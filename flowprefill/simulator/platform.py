"""Platform: what a simulation needs to know of the machine that it stands for.

A platform is one replica of a model: one device, or several that share it. GpuPlatform is made of
data sheets, ProfiledPlatform (profiled.py) of what was measured on a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.scheduler.scheduler import SchedulerOptions
from flowprefill.simulator.cost import CostModel
from flowprefill.simulator.data_sheets import A800, MODELS, DeviceSheet, ModelSheet, shard
from flowprefill.simulator.roofline import RooflineCost, num_kv_tokens
from flowprefill.workload import PREFIX_BLOCK_TOKENS

MAX_NUM_SEQS = 64
"""Sequences of a decode step, and prompts of a packed prefill, on a GPU."""


class Platform(Protocol):
    """One replica of a model. Hashable, and can be sent to other processes."""

    @property
    def device_name(self) -> str: ...

    @property
    def model_name(self) -> str: ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a KV block; divides PREFIX_BLOCK_TOKENS."""
        ...

    @property
    def num_blocks(self) -> int:
        """KV blocks that there are."""
        ...

    @property
    def max_tokens(self) -> int:
        """Of a prompt and its answer."""
        ...

    def cost(self, granularity: Granularity) -> CostModel:
        """Times of prefills that run at this granularity; the same object each time."""
        ...

    def options(self, granularity: Granularity) -> SchedulerOptions:
        """The scheduler's options, policy apart."""
        ...


@dataclass(frozen=True)
class GpuPlatform:
    """A model on one or several GPUs, from their data sheets. KV blocks are as long as the prefix
    blocks of traces."""

    device: DeviceSheet
    model: ModelSheet
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        rank = shard(self.model.spec, self.tensor_parallel)
        if num_kv_tokens(rank, self.device) < PREFIX_BLOCK_TOKENS:
            raise ConfigError(
                f"{self.model_name} on {self.device_name}: no memory is left for keys and values; "
                f"more devices must share it"
            )

    @property
    def device_name(self) -> str:
        devices = f"{self.tensor_parallel} x " if self.tensor_parallel > 1 else ""
        return f"{devices}{self.device.name}"

    @property
    def model_name(self) -> str:
        return self.model.name

    @property
    def block_tokens(self) -> int:
        return PREFIX_BLOCK_TOKENS

    @property
    def num_blocks(self) -> int:
        rank = shard(self.model.spec, self.tensor_parallel)
        return num_kv_tokens(rank, self.device) // PREFIX_BLOCK_TOKENS

    @property
    def max_tokens(self) -> int:
        return self.num_blocks * PREFIX_BLOCK_TOKENS

    def cost(self, granularity: Granularity) -> RooflineCost:
        return _roofline(self, granularity)

    def options(self, granularity: Granularity) -> SchedulerOptions:
        max_pack_tokens = granularity.pack_tokens(self.cost(granularity).saturation_tokens)
        return SchedulerOptions(max_num_seqs=MAX_NUM_SEQS, max_pack_tokens=max_pack_tokens)


@cache
def _roofline(platform: GpuPlatform, granularity: Granularity) -> RooflineCost:
    """One for all simulations of a process: it remembers the prompts that it has seen."""
    return RooflineCost(
        granularity,
        spec=platform.model.spec,
        device=platform.device,
        tensor_parallel=platform.tensor_parallel,
    )


PAPER_PLATFORM = GpuPlatform(A800, MODELS["Llama-3.1-8B"])
"""That of the FlowPrefill paper."""
