"""From EngineConfig to a transformers model that can run as a HookedProgram.

transformers and greenlet are optional: this package is imported only where model.json, or an
architecture without a native program, asks for it. Nothing is downloaded, no code of a model runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowprefill.clock import Clock
from flowprefill.config import EngineConfig
from flowprefill.errors import ModelLoadError
from flowprefill.executor.device import Device, model_dtype
from flowprefill.granularity import Granularity
from flowprefill.hooks.availability import HookedSpec, read_spec, text_config
from flowprefill.hooks.causal_lm import CausalLM
from flowprefill.hooks.predictor import HookedPredictor, HookedProfiler, make_predictor
from flowprefill.hooks.program import HookedProgram
from flowprefill.host_cpu import cpu_model
from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import blocks_in
from flowprefill.predictor.profile import Profile
from flowprefill.predictor.profile_cache import Key, ProfileCache
from flowprefill.programs.weights import OnProgress
from flowprefill.version import __version__

_TILE_ROWS = 256
_CUDA_TILE_ROWS = 2048
"""Tokens of one forward pass in granularity `tile`: boundaries are as close as a pass is short."""
_NUM_STATES = 16
"""Blocks with a recurrent state each that count as one request of max_model_len, if it needs fewer:
by default there is room for some short requests at once."""


@dataclass(frozen=True)
class CountedBlocks:
    """A KV cache that is only counted: keys and values are in each sequence's own cache object."""

    num_blocks: int
    block_size: int


@dataclass(frozen=True)
class HookedModel:
    """A model on its device; what LoadedModel is for native programs."""

    config: EngineConfig
    """Without prefix caching, and with the blocks that are counted."""
    spec: HookedSpec
    device: Device
    dtype: torch.dtype
    cache: CountedBlocks
    program: HookedProgram
    kernels: str

    def profile(self, clock: Clock, on_progress: OnProgress) -> Profile:
        """Seconds of passes, of an earlier load if there was one; nothing else may use the program
        meanwhile."""
        cache = ProfileCache(ProfileCache.default_directory())
        profiler = self._profiler(clock)
        return cache.load_or_take(self._profile_key(), profiler, self.max_tokens, on_progress)

    @property
    def max_tokens(self) -> int:
        """Of a sequence that fits into the model and the cache."""
        capacity = self.cache.num_blocks * self.cache.block_size
        return min(self.spec.max_position_embeddings, capacity)

    def _profiler(self, clock: Clock) -> HookedProfiler:
        cache = self.cache

        def new_tables(num_sequences: int, num_tokens: int) -> list[BlockTable]:
            count = -(-num_tokens // cache.block_size)
            if num_sequences * count > cache.num_blocks:
                return []
            ranges = [range(i * count, (i + 1) * count) for i in range(num_sequences)]
            return [BlockTable(r, cache.block_size, self.device.torch_device) for r in ranges]

        vocab_size = self.spec.vocab_size
        return HookedProfiler(self.program, self.device, clock, new_tables, vocab_size)

    def _profile_key(self) -> Key:
        """Everything that seconds of passes depend on."""
        device = self.device.torch_device
        is_cuda = device.type == "cuda"
        return {
            "flowprefill": __version__,
            "torch": torch.__version__,
            "program": "hooks",
            "architecture": self.spec.architecture,
            "model": _content(self.program.lm.model),
            "kernels": self.kernels,
            "dtype": str(self.dtype),
            "device": torch.cuda.get_device_name(device) if is_cuda else cpu_model(),
            "num_threads": self.device.num_threads,
            "num_slices": self.program.lm.num_slices,
            "block_size": self.cache.block_size,
            "max_tokens": self.max_tokens,
        }

    def predictor(self, profile: Profile, granularity: Granularity) -> HookedPredictor:
        return make_predictor(profile, self.program, granularity)


def load_hooked(
    config: EngineConfig,
    path: Path,
    architecture: str,
    device: Device,
    kv_bytes: Callable[[int], tuple[int, str]],
    on_progress: OnProgress,
) -> HookedModel:
    """Load the transformers model in the folder `path`.

    architecture: its name, as check_available gives it
    kv_bytes: from the bytes of one request of max_model_len, those that the KV cache may have, and
    in words the setting that says so
    Raises ConfigError or ModelLoadError.
    """
    dtype = model_dtype(config, device)
    spec = read_spec(path, architecture, config.max_model_len)
    on_progress("load weights", 0.0)
    model, unused = load_causal_lm(path, dtype, device.torch_device)
    on_progress("load weights", 1.0)
    if unused:
        on_progress(f"{len(unused)} tensors have no place in it, such as {unused[0]!r}", 1.0)
    lm = CausalLM(model, config.hook_boundaries)
    spec = _with_logits_of(lm, spec)
    program = HookedProgram(lm, tile_rows(device, model.config))
    cache = _count_blocks(lm, spec, config.block_size, kv_bytes)
    config = replace(config, enable_prefix_caching=False, block_size=cache.block_size)
    return HookedModel(config, spec, device, dtype, cache, program, _kernels())


def load_causal_lm(
    path: Path, dtype: torch.dtype, device: torch.device
) -> tuple[nn.Module, list[str]]:
    """The transformers model in the folder `path`, and the tensors there that it has no place for.

    Raises ModelLoadError.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        model: nn.Module = loaded[0]
        if any(p.device != device for p in model.parameters()):
            model = model.to(device)  # quantised ones are there, and some refuse to be moved
    except Exception as error:  # of many kinds, all of them the model's
        raise ModelLoadError(f"{path}: transformers cannot load it: {error}") from error
    missing = sorted(map(str, loaded[1]["missing_keys"]))
    if missing:  # transformers would go on with random numbers
        raise ModelLoadError(f"{path}: {len(missing)} tensors are missing, such as {missing[0]!r}")
    return model.eval(), sorted(map(str, loaded[1]["unexpected_keys"]))


def _with_logits_of(lm: CausalLM, spec: HookedSpec) -> HookedSpec:
    """With the tokens that the model can choose from: some give fewer logits than config.json has
    token ids."""
    if lm.num_logits > spec.vocab_size:
        raise ModelLoadError(
            f"{spec.architecture}: {lm.num_logits} logits, but vocab_size={spec.vocab_size}"
        )
    return replace(spec, vocab_size=lm.num_logits)


def _content(model: nn.Module) -> str:
    """Digest of names, shapes and some numbers of each weight: tells models apart."""
    content = hashlib.sha256()
    for name, weight in model.named_parameters():
        content.update(f"{name} {tuple(weight.shape)}".encode())
        some = weight.detach().flatten()[:16].cpu().contiguous()
        content.update(some.view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _count_blocks(
    lm: CausalLM, spec: HookedSpec, block_size: int, kv_bytes: Callable[[int], tuple[int, str]]
) -> CountedBlocks:
    """Blocks that the memory holds if each is the first of a sequence, with its recurrent state."""
    block_size = _block_size(lm, spec.max_position_embeddings, block_size)
    block_bytes = lm.token_bytes * block_size + lm.sequence_bytes
    need = -(-spec.max_position_embeddings // block_size) * block_bytes
    states = _NUM_STATES * block_bytes if lm.sequence_bytes else 0
    memory, setting = kv_bytes(max(need, states))
    num_blocks = blocks_in(memory, setting, block_bytes, block_size, spec.max_position_embeddings)
    return CountedBlocks(num_blocks, block_size)


def _block_size(lm: CausalLM, max_tokens: int, block_size: int) -> int:
    """Tokens of a block, `block_size` or more.

    A recurrent state is as large for one token as for many, but each block counts one. So a block
    has as many tokens as are as large as the state, or all: a sequence counts at most twice.
    """
    if not lm.sequence_bytes:
        return block_size
    as_large = -(-lm.sequence_bytes // lm.token_bytes) if lm.token_bytes else max_tokens
    return max(block_size, min(as_large, max_tokens))


def tile_rows(device: Device, config: Any) -> int:
    """Tokens of one forward pass in granularity `tile`.

    config: the model's. Eager attention writes the scores of a pass's rows and all keys to memory
    that nobody counts, so its passes are short on CUDA too.
    """
    is_eager = getattr(text_config(config), "_attn_implementation", None) == "eager"
    is_long = device.torch_device.type == "cuda" and not is_eager
    return _CUDA_TILE_ROWS if is_long else _TILE_ROWS


def _kernels() -> str:
    import transformers

    return f"transformers {transformers.__version__}"
