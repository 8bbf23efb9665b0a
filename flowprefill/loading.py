"""From EngineConfig to a model that can run: device, weights, KV cache, program."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from flowprefill.clock import Clock
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.executor.device import Device, make_device, model_dtype
from flowprefill.executor.sampler import Sampler, SamplingState
from flowprefill.granularity import Granularity
from flowprefill.host_cpu import cpu_model, num_cpus
from flowprefill.host_memory import available_bytes
from flowprefill.interrupt import Interrupt
from flowprefill.kv.block_table import BlockTable
from flowprefill.kv.cache import KVCache, blocks_in
from flowprefill.predictor.profile import Profile
from flowprefill.predictor.profile_cache import Key, ProfileCache
from flowprefill.predictor.profiler import Profiler
from flowprefill.programs.choice import Kernels, choose_kernels, make_operators
from flowprefill.programs.decoder import DecoderProgram
from flowprefill.programs.model_spec import (
    ModelSpec,
    check_max_model_len,
    read_model_spec,
    resolve_model_path,
)
from flowprefill.programs.program import RunSlice
from flowprefill.programs.sharding import Shard
from flowprefill.programs.torch_operators import SumRanks
from flowprefill.programs.weights import DecoderWeights, OnProgress, load_weights
from flowprefill.sampling_params import SamplingParams
from flowprefill.version import __version__

if TYPE_CHECKING:
    from flowprefill.parallel.ranks import Ranks

_DEFAULT_CPU_SEQUENCES = 4
"""Requests of max_model_len in the KV cache of a CPU, unless model.json says otherwise or that were
over half of the free memory."""


@dataclass(frozen=True)
class LoadedModel:
    """A model on its device."""

    spec: ModelSpec
    """Of the whole model; max_position_embeddings is the engine's max_model_len."""
    device: Device
    dtype: torch.dtype
    cache: KVCache
    program: DecoderProgram
    content: str
    """Digest of spec and some weights: tells models of one shape apart."""
    kernels: str
    """Name and build of the operators."""
    ranks: Ranks | None = None
    """The others, if the model is divided; the owner of the model closes them."""


MakeWeights = Callable[[ModelSpec, torch.dtype, torch.device], DecoderWeights]


@dataclass(frozen=True)
class PartPlan:
    """What all ranks of a model have in common beside model.json."""

    num_ranks: int
    device: str
    """Type of the device; on cuda a rank has the card of its number."""
    dtype: str
    kernels: Kernels
    num_threads: int
    """Of each rank on a CPU."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_wire(values: dict[str, Any]) -> PartPlan:
        return PartPlan(**values)


@dataclass(frozen=True)
class ModelPart:
    """What one rank computes of a model; usually all of it."""

    config: EngineConfig
    plan: PartPlan
    spec: ModelSpec
    """Of the part."""
    device: Device
    weights: DecoderWeights

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embed.dtype

    @property
    def num_blocks(self) -> int:
        """KV blocks that this rank has room for. Raises ConfigError if they are too few."""
        return num_kv_blocks(self.config, self.spec, self.dtype, self.device.torch_device)

    def build(self, num_blocks: int, sum_ranks: SumRanks | None) -> tuple[DecoderProgram, str]:
        """The program with its KV cache, and name and build of its kernels. Once.

        sum_ranks: of a model that is divided
        """
        spec, kernels = self.spec, self.plan.kernels
        cache = KVCache(
            num_blocks,
            self.config.block_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self.dtype,
            device=self.device.torch_device,
            is_packed=kernels == "native",
        )
        limits = self.device.slice_limits(
            spec, self.dtype, self.config.max_slice_ms / 1000, kernels != "torch"
        )
        operators, build = make_operators(
            kernels, spec, self.weights, cache, self.device.num_threads, sum_ranks
        )
        return DecoderProgram(spec, operators, limits), build


def load_model(
    config: EngineConfig,
    on_progress: OnProgress,
    make_weights: MakeWeights | None = None,
    rank_module: str | None = None,
) -> LoadedModel:
    """Load what model.json names. Raises ConfigError, ModelLoadError, or RankError if a rank ended.

    make_weights: gives the weights, on the device, in place of the model's files; not if the model
    is divided
    rank_module: what the other ranks run, if there are any; None = follower.py
    """
    path = resolve_model_path(config.model)
    spec = _with_max_model_len(read_model_spec(path), config.max_model_len)
    num_ranks = config.tensor_parallel_size
    assert num_ranks == 1 or make_weights is None, "each rank loads its part of files"
    shard = Shard(0, num_ranks)
    part_spec = shard.of_spec(spec)
    num_threads = config.num_threads
    if num_ranks > 1:
        num_threads = num_threads or max(1, num_cpus() // num_ranks)
    device = make_device(config.device, config.max_slice_ms / 1000, num_threads)
    _check_cards(device, num_ranks)
    dtype = model_dtype(config, device)
    kernels = _choose_kernels(config, part_spec, dtype, device, on_progress)
    type_name, dtype_name = device.torch_device.type, str(dtype).removeprefix("torch.")
    plan = PartPlan(num_ranks, type_name, dtype_name, kernels, device.num_threads)
    ranks = _start_ranks(config, plan, rank_module) if num_ranks > 1 else None
    try:
        if make_weights:
            weights = make_weights(spec, dtype, device.torch_device)
        else:
            weights = load_weights(path, part_spec, dtype, on_progress, shard=shard)
            weights = weights.to(device.torch_device)
        part = ModelPart(config, plan, part_spec, device, weights)
        return _build_model(part, spec, ranks, on_progress)
    except BaseException:
        if ranks:
            ranks.close()
        raise


def load_part(config: EngineConfig, plan: PartPlan, rank: int) -> ModelPart:
    """A further rank's part of a model. Raises as load_model does."""
    path, shard = resolve_model_path(config.model), Shard(rank, plan.num_ranks)
    spec = shard.of_spec(_with_max_model_len(read_model_spec(path), config.max_model_len))
    max_slice_s = config.max_slice_ms / 1000
    device = make_device(plan.device, max_slice_s, plan.num_threads, rank)
    weights = load_weights(path, spec, getattr(torch, plan.dtype), shard=shard)
    return ModelPart(config, plan, spec, device, weights.to(device.torch_device))


def _build_model(
    part: ModelPart, spec: ModelSpec, ranks: Ranks | None, on_progress: OnProgress
) -> LoadedModel:
    """spec: of the whole model"""
    on_progress("prepare operators", 0.0)
    device, dtype, content = part.device, part.dtype, _content(spec, part.weights)
    num_blocks = part.num_blocks
    if ranks is None:
        program, kernels = part.build(num_blocks, None)
        on_progress("prepare operators", 1.0)
        cache = program.operators.cache
        return LoadedModel(spec, device, dtype, cache, program, content, kernels)
    from flowprefill.parallel.leader import LeadingProgram

    num_blocks = ranks.agree_on_blocks(num_blocks, device.torch_device)
    program, kernels = part.build(num_blocks, ranks.sum)
    ranks.wait_ready()
    on_progress("prepare operators", 1.0)
    leading, cache = LeadingProgram(program, ranks), program.operators.cache
    kernels = f"{kernels}, {ranks.num_ranks} ranks"
    return LoadedModel(spec, device, dtype, cache, leading, content, kernels, ranks)


def _start_ranks(config: EngineConfig, plan: PartPlan, module: str | None) -> Ranks:
    from flowprefill.parallel.ranks import FOLLOWER, Ranks

    start = {"config": config.to_dict(), "plan": plan.to_wire()}
    return Ranks(plan.num_ranks, start, module or FOLLOWER)


def _check_cards(device: Device, num_ranks: int) -> None:
    if device.torch_device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise ConfigError(
            f"model.json: tensor_parallel_size={num_ranks}: must be at most "
            f"{torch.cuda.device_count()}, the CUDA devices that torch finds"
        )


def _choose_kernels(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: Device,
    on_progress: OnProgress,
) -> Kernels:
    """spec: of a rank's part"""
    is_divided = config.tensor_parallel_size > 1
    if is_divided and config.kernels == "auto" and device.torch_device.type == "cpu":
        # our own run operators behind each other in one call, with no sum over ranks between them
        config = replace(config, kernels="torch")
    return choose_kernels(config, spec, dtype, device.torch_device, on_progress)


def _content(spec: ModelSpec, weights: DecoderWeights) -> str:
    norms = [weights.norm, *(layer.input_norm for layer in weights.layers)]
    content = hashlib.sha256(repr(spec).encode())
    for tensor in (*norms, weights.embed[:64]):
        content.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def _with_max_model_len(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    limit = spec.max_position_embeddings
    check_max_model_len(max_model_len, limit)
    return replace(spec, max_position_embeddings=max_model_len or limit)


def num_kv_blocks(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> int:
    """KV blocks that the configured memory holds; spec: of this rank's part. Raises ConfigError if
    they are too few.

    They may be too few for a request of max_model_len: the engine refuses what cannot fit.
    """
    token_bytes = spec.kv_bytes_per_token(dtype.itemsize)
    sizes = config.kv_cache_memory_bytes, config.kv_cache_memory_fraction
    if device.type == "cuda" and sizes == (None, None):
        token_bytes += live_bytes_per_token(config, spec, dtype)
    block_bytes = config.block_size * token_bytes
    need = -(-spec.max_position_embeddings // config.block_size) * block_bytes
    memory, setting = kv_cache_bytes_on(device, config, need)
    return blocks_in(memory, setting, block_bytes, config.block_size, spec.max_position_embeddings)


def live_bytes_per_token(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """What a begun prefill holds beside its KV blocks; see ProgramState.live_bytes. In the order of
    `op` these are all queries, else those of one tile, which do not count."""
    q_size = spec.q_size if Granularity.parse(config.granularity).kind == "op" else 0
    return (spec.hidden_size + q_size) * dtype.itemsize


def kv_cache_bytes_on(device: torch.device, config: EngineConfig, need: int) -> tuple[int, str]:
    """kv_cache_bytes with what is free on the device now; ranks on a CPU share its memory."""
    if device.type == "cuda":
        return kv_cache_bytes(config, need, *torch.cuda.mem_get_info(device))
    available = available_bytes()
    share = None if available is None else available // config.tensor_parallel_size
    return kv_cache_bytes(config, need, share)


def kv_cache_bytes(
    config: EngineConfig, need: int, free: int | None, cuda_total: int | None = None
) -> tuple[int, str]:
    """Size of the KV cache, bytes, and in words the setting that it comes from.

    need: bytes of one request of max_model_len
    free: bytes free on the device; None = not known
    cuda_total: bytes of a CUDA card; None on a CPU
    Raises ConfigError if a share of an unknown amount is asked for.
    """
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes, f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    if config.kv_cache_memory_fraction is not None:
        setting = f"kv_cache_memory_fraction={config.kv_cache_memory_fraction}"
        if free is None:
            raise ConfigError(
                f"model.json: {setting}: the system does not tell how much memory is free; set "
                "kv_cache_memory_bytes instead"
            )
        return int(free * config.kv_cache_memory_fraction), f"{setting} of {free} free bytes"
    wanted = _DEFAULT_CPU_SEQUENCES * need
    if free is None:
        return wanted, f"kv_cache_memory_bytes={wanted} by default"
    if cuda_total is not None:
        memory = int(free - (1 - config.gpu_memory_utilization) * cuda_total)
        return memory, f"gpu_memory_utilization={config.gpu_memory_utilization} leaves {memory}"
    # Half of what is free, but one request must fit if it can.
    memory = min(wanted, max(need, free // 2), free)
    return memory, f"kv_cache_memory_bytes={memory} by default"


def profile_model(
    model: LoadedModel,
    clock: Clock,
    on_progress: OnProgress,
    cache: ProfileCache | None = None,
    refresh: bool = False,
) -> Profile:
    """Seconds of slices on the fresh model, whose KV cache nobody uses yet.

    cache: None = the user's. A profile found there is taken, unless `refresh`; one that is not kept
    there costs a stage of its own that says why.
    """
    max_tokens = min(
        model.spec.max_position_embeddings, model.cache.num_blocks * model.cache.block_size
    )
    cache = cache or ProfileCache(ProfileCache.default_directory())
    key = _profile_key(model, max_tokens)
    profiler = _make_profiler(model, clock)
    return cache.load_or_take(key, profiler, max_tokens, on_progress, refresh)


def _make_profiler(model: LoadedModel, clock: Clock) -> Profiler:
    cache, device, vocab_size = model.cache, model.device, model.spec.vocab_size
    sampler = Sampler(vocab_size)

    interrupt = Interrupt(clock)
    interrupt.raise_now()  # each slice is timed by itself

    def run(run_slice: RunSlice) -> bool:
        may_leave = device.run(run_slice, 0.0, interrupt)
        device.wait()
        return may_leave

    def new_table(index: int, num_tokens: int) -> BlockTable:
        num_blocks = -(-num_tokens // cache.block_size)
        first = index * num_blocks % (cache.num_blocks - num_blocks + 1)
        block_ids = range(first, first + num_blocks)
        return BlockTable(block_ids, cache.block_size, device.torch_device)

    def choose(logits: torch.Tensor) -> None:
        params = SamplingParams()
        states = [SamplingState(params, (), (), seed) for seed in range(len(logits))]
        sampler.sample(logits, states)

    limits = model.program.limits
    return Profiler(model.program, limits, run, clock, new_table, choose, vocab_size)


def _profile_key(model: LoadedModel, max_tokens: int) -> Key:
    """Everything that seconds of slices, and the bits of rows, depend on."""
    spec, device, program = model.spec, model.device.torch_device, model.program
    is_cuda = device.type == "cuda"
    return {
        "flowprefill": __version__,
        "torch": torch.__version__,
        "architecture": spec.architecture,
        "model": model.content,
        "kernels": model.kernels,
        "dtype": str(model.dtype),
        "device": torch.cuda.get_device_name(device) if is_cuda else cpu_model(),
        "num_threads": model.device.num_threads,
        "tile_rows": program.limits.tile_rows,
        "mlp_rows": program.limits.mlp_rows or 0,
        "attention_work": program.limits.attention_work,
        "block_size": model.cache.block_size,
        "max_tokens": max_tokens,
    }
