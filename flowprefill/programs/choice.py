"""Whose kernels run a model: model.json's `kernels`, and what there is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.host_cpu import cpu_flags
from flowprefill.kernels import TritonUnavailableError, keep_compiled_kernels
from flowprefill.kv.cache import KVCache
from flowprefill.native.library import NativeUnavailableError, build_name, load_library
from flowprefill.programs import native_operators
from flowprefill.programs.model_spec import ModelSpec
from flowprefill.programs.native_operators import NativeOperators
from flowprefill.programs.operators import Operators
from flowprefill.programs.torch_operators import SumRanks, TorchOperators
from flowprefill.programs.weights import DecoderWeights

Kernels: TypeAlias = Literal["native", "triton", "torch"]
_NAMES = {"native": "native kernels", "triton": "Triton kernels"}


def choose_kernels(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[str, float], None],
) -> Kernels:
    """Those asked for; with "auto" those of the device, or torch's, and a stage that says why.
    Raises ConfigError if those asked for cannot run the model here."""
    if config.kernels == "torch":
        return "torch"
    is_native = device.type == "cpu" and config.kernels != "triton"
    kernels: Kernels = "native" if is_native else "triton"
    try:
        if is_native:
            native_operators.check_support(spec, dtype, config.block_size, cpu_flags())
            load_library()
        else:
            _check_triton(spec, dtype, config.block_size, device)
    except (NativeUnavailableError, TritonUnavailableError) as error:
        if config.kernels == kernels:
            raise ConfigError(f"model.json: kernels={kernels!r}: {error}") from error
        on_progress(f"no {_NAMES[kernels]}, torch's operators instead: {error}", 1.0)
        return "torch"
    return kernels


def _check_triton(
    spec: ModelSpec, dtype: torch.dtype, block_size: int, device: torch.device
) -> None:
    try:
        from flowprefill.programs import triton_operators
    except ImportError as error:
        raise TritonUnavailableError(f"they need the package triton: {error}") from error
    keep_compiled_kernels()
    triton_operators.check_support(spec, dtype, block_size, device)


def make_operators(
    kernels: Kernels,
    spec: ModelSpec,
    weights: DecoderWeights,
    cache: KVCache,
    num_threads: int,
    sum_ranks: SumRanks | None = None,
) -> tuple[Operators, str]:
    """The operators, and name and build of their kernels.

    cache: packed for the native kernels
    sum_ranks: of a model that is divided; not for the native kernels
    """
    if kernels == "native":
        assert sum_ranks is None
        native = NativeOperators(spec, weights, cache, num_threads)
        return native, f"native {build_name()}"
    if kernels == "triton":
        from flowprefill.programs import triton_operators

        return triton_operators.make_operators(spec, weights, cache, sum_ranks)
    return TorchOperators(spec, weights, cache, sum_ranks), "torch"
