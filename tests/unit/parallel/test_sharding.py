"""Parts of a model put together are the model; what cannot be divided is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.errors import ConfigError
from flowprefill.programs.model_spec import read_model_spec
from flowprefill.programs.sharding import Shard
from flowprefill.programs.weights import DecoderWeights, load_weights
from tests.factories import ARCHITECTURES, write_tiny_gguf, write_tiny_model
from tests.unit.hooks.tiny import make_model

SIZES = {"heads": 8, "kv_heads": 4, "intermediate": 96}


def load(path: Path, shard: Shard) -> DecoderWeights:
    spec = shard.of_spec(read_model_spec(path))
    return load_weights(path, spec, torch.float32, shard=shard)


def assert_parts_make_the_whole(path: Path, num_ranks: int) -> None:
    spec, whole = read_model_spec(path), load(path, Shard())
    parts = [load(path, Shard(rank, num_ranks)) for rank in range(num_ranks)]
    q, kv = spec.q_size // num_ranks, spec.kv_size // num_ranks
    for i, layer in enumerate(whole.layers):
        pieces = [part.layers[i] for part in parts]

        def stacked(name: str, sizes: list[int], pieces: list[Any] = pieces) -> torch.Tensor:
            """Rows of each rank's stacked tensors, stacked as in the whole model."""
            split = [getattr(piece, name).split(sizes) for piece in pieces]
            return torch.cat([part for same in zip(*split, strict=True) for part in same])

        assert torch.equal(stacked("qkv", [q, kv, kv]), layer.qkv)
        if layer.qkv_bias is not None:
            assert torch.equal(stacked("qkv_bias", [q, kv, kv]), layer.qkv_bias)
        inner = spec.intermediate_size // num_ranks
        assert torch.equal(stacked("gate_up", [inner, inner]), layer.gate_up)
        assert torch.equal(torch.cat([p.o_proj for p in pieces], dim=1), layer.o_proj)
        assert torch.equal(torch.cat([p.down for p in pieces], dim=1), layer.down)
        for name in ("input_norm", "post_norm", "q_norm", "k_norm"):
            for piece in pieces:
                ours, other = getattr(piece, name), getattr(layer, name)
                assert ours is other is None or torch.equal(ours, other)
    for part in parts:
        assert torch.equal(part.embed, whole.embed) and torch.equal(part.norm, whole.norm)
        assert torch.equal(part.lm_head, whole.lm_head)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_parts_of_a_folder_make_the_whole(
    tmp_path: Path, architecture: str, num_ranks: int
) -> None:
    path = write_tiny_model(tmp_path, architecture, head_dim=32, **SIZES)
    assert_parts_make_the_whole(path, num_ranks)


@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
def test_parts_of_a_gguf_file_make_the_whole(tmp_path: Path, quant: str) -> None:
    """Twice: read, and from the cache, where parts must not be taken for each other."""
    folder = write_tiny_model(tmp_path / "hf", **SIZES, hidden=128, tied=True)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", folder, quant)
    for _ in range(2):
        assert_parts_make_the_whole(path, 2)


@pytest.mark.parametrize(
    ("num_ranks", "sizes", "limit"),
    [
        (3, {}, "num_heads=8"),
        (8, {}, "num_kv_heads=4"),
        (2, {"intermediate": 97}, "intermediate_size=97"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    tmp_path: Path, num_ranks: int, sizes: dict[str, int], limit: str
) -> None:
    path = write_tiny_model(tmp_path, **{**SIZES, **sizes})
    config = EngineConfig(str(path), device="cpu", tensor_parallel_size=num_ranks)
    message = f"model.json: tensor_parallel_size={num_ranks}: must divide the model's {limit}"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        Engine(config, lambda output: None)


@pytest.mark.parametrize(("key", "value"), [("kernels", "native"), ("program", "hooks")])
def test_what_cannot_sum_over_ranks_is_refused(key: str, value: str) -> None:
    message = f"tensor_parallel_size=2: must be 1 with {key}='{value}'"
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_dict({"model": "m", "tensor_parallel_size": 2, key: value})


def test_a_model_that_is_only_hooked_is_refused(tmp_path: Path) -> None:
    make_model("GPTNeoX").save_pretrained(tmp_path)  # type: ignore[operator]
    config = EngineConfig(str(tmp_path), device="cpu", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2: must be 1 for a hooked model"):
        Engine(config, lambda output: None)
