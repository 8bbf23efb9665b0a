"""Data sheets: devices and models by name, and the efficiencies that all devices share.

Device figures are the vendor's, model shapes those of the public config.json files. No figure here
was measured by us or fitted to a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flowprefill.errors import ConfigError
from flowprefill.programs.family import ModelSpec
from flowprefill.workload import BY_TYPE, Objective, TraceRequest, objective


@dataclass(frozen=True)
class Efficiency:
    """What good kernels reach of a data sheet's figures, the same on all devices."""

    product: float = 0.62
    """Of the dense bf16 peak, by a matrix product whose tiles fill every wave. Large products of
    cuBLAS reach 0.6 to 0.75; at the lower end where power limits the clock."""
    attention: float = 0.5
    """Of the same peak. FlashAttention-2 (arXiv 2307.08691) reaches up to 0.73 on an A100 and less
    with a causal mask, FlashAttention-3 (arXiv 2407.08608) up to 0.75 on an H100."""
    bandwidth: float = 0.8
    """Of device memory; a copy reaches about 0.85 to 0.9."""
    link: float = 0.77
    """Of one direction of NVLink, in an all-reduce; nccl-tests shows a bus bandwidth of some 230 of
    300 GB/s on 8 A100."""
    launch_s: float = 4e-6
    """Gap between two operators that are launched ahead."""
    all_reduce_s: float = 10e-6
    """Latency of an all-reduce, however few bytes."""


EFFICIENCY = Efficiency()


@dataclass(frozen=True)
class DeviceSheet:
    """What a device can do."""

    name: str
    flops: float
    """Dense bf16, per second."""
    bandwidth: float
    """Bytes per second of device memory."""
    memory_bytes: float
    num_processors: int
    """Streaming multiprocessors."""
    link_bandwidth: float
    """Bytes per second of NVLink in one direction, all links together."""


A800 = DeviceSheet("A800-80GB", 312e12, 2.039e12, 80e9, 108, 200e9)
"""The arithmetic of an A100 with slower links; a whole prefill of Llama-3.1-8B gets some 11,000
tokens/s."""
A100 = DeviceSheet("A100-80GB", 312e12, 2.039e12, 80e9, 108, 300e9)
H100 = DeviceSheet("H100-SXM", 989e12, 3.35e12, 80e9, 132, 450e9)
H200 = DeviceSheet("H200-SXM", 989e12, 4.8e12, 141e9, 132, 450e9)

DEVICES = {"A800": A800, "A100": A100, "H100": H100, "H200": H200}
"""By the name that the command line takes."""

LLAMA_3_1_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    vocab_size=128_256,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    eos_token_ids=(128_001,),
    bos_token_id=128_000,
)

LLAMA_3_1_70B = replace(
    LLAMA_3_1_8B, num_layers=80, hidden_size=8192, num_heads=64, intermediate_size=28_672
)

QWEN_2_5_14B = replace(
    LLAMA_3_1_8B,
    architecture="Qwen2ForCausalLM",
    num_layers=48,
    hidden_size=5120,
    num_heads=40,
    intermediate_size=13_824,
    vocab_size=152_064,
    rope_theta=1_000_000.0,
    qkv_bias=True,
    eos_token_ids=(151_643,),
    bos_token_id=151_643,
)

_CLASSES = (("text", "short"), ("image", "medium"), ("search", "long"), ("file", "document"))
"""SLO classes that share an objective: by type, by length (workload.py)."""


@dataclass(frozen=True)
class ModelSheet:
    """A model, on how many devices it runs, and what its users are promised."""

    name: str
    spec: ModelSpec
    tensor_parallel: int
    """Devices of one replica, unless the user says otherwise."""
    ttft_slo_s: tuple[float, float, float, float]
    """Of text, image, search and file, as the FlowPrefill paper sets them for this model."""

    def objective(self, request: TraceRequest, scale: float = 1.0) -> Objective:
        """The request's SLO class; TTFT objectives are this model's, times `scale` like those of
        TBT, which are the same for all models."""
        found = objective(request, scale)
        for names, ttft_s in zip(_CLASSES, self.ttft_slo_s, strict=True):
            if found.name in names:
                return replace(found, ttft_s=found.ttft_s * (ttft_s / BY_TYPE[names[0]].ttft_s))
        raise AssertionError(f"unknown SLO class {found.name}")


MODELS = {
    sheet.name: sheet
    for sheet in (
        ModelSheet("Llama-3.1-8B", LLAMA_3_1_8B, 1, (0.25, 0.5, 4.0, 6.0)),
        ModelSheet("Qwen2.5-14B", QWEN_2_5_14B, 1, (0.4, 0.8, 6.5, 9.0)),
        ModelSheet("Llama-3.1-70B", LLAMA_3_1_70B, 4, (1.0, 2.0, 15.0, 18.0)),
    )
}
"""By the name that the command line takes."""


def shard(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """The part of a model that one of num_ranks devices computes (Megatron-LM, arXiv 1909.08053).

    Attention heads, the inner dimension of the MLP and the vocabulary are divided; KV heads are
    repeated where there are fewer of them than ranks. Raises ConfigError if something is not whole.
    """
    kv_heads = max(spec.num_kv_heads, num_ranks)
    for what, number in (
        ("attention heads", spec.num_heads),
        ("KV heads", kv_heads),
        ("MLP rows", spec.intermediate_size),
        ("vocabulary entries", spec.vocab_size),
    ):
        if num_ranks < 1 or number % num_ranks:
            raise ConfigError(f"tensor parallel {num_ranks}: does not divide {number} {what}")
    return replace(
        spec,
        num_heads=spec.num_heads // num_ranks,
        num_kv_heads=kv_heads // num_ranks,
        intermediate_size=spec.intermediate_size // num_ranks,
        vocab_size=spec.vocab_size // num_ranks,
        eos_token_ids=(),  # ids of the whole vocabulary
        bos_token_id=None,
    )
