"""Rotation and its frequencies against transformers', for each kind of context scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowprefill.ops.rope import RotaryTable
from flowprefill.programs.model_spec import read_model_spec
from flowprefill.programs.rope_frequencies import rope_frequencies
from tests.factories import write_tiny_model

CPU = torch.device("cpu")
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "default", "rope_theta": 10_000.0},
    "theta": {"rope_type": "default", "rope_theta": 500_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
POSITIONS = torch.tensor([0, 1, 2, 63, 127, 128, 500, 1023])


@pytest.fixture(scope="module", params=SCALINGS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head_dim of 64 has wavelengths on both sides of llama3's thresholds."""
    return write_tiny_model(
        tmp_path_factory.mktemp(request.param),
        num_layers=1,
        head_dim=64,
        heads=2,
        kv_heads=1,
        max_len=1024,
        rope_parameters=SCALINGS[request.param],
    )


def transformers_rotary(directory: Path) -> Any:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(AutoConfig.from_pretrained(directory))


def test_frequencies_equal_transformers(model: Path) -> None:
    expected = transformers_rotary(model).inv_freq
    torch.testing.assert_close(rope_frequencies(read_model_spec(model)), expected)


def test_rotated_rows_equal_transformers(model: Path) -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x = torch.randn(len(POSITIONS), 3, 64, generator=torch.Generator().manual_seed(0))
    cos, sin = transformers_rotary(model)(x, POSITIONS[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    table = RotaryTable(rope_frequencies(read_model_spec(model)), 1024, CPU)
    rotated = table.apply(x, POSITIONS)
    torch.testing.assert_close(rotated, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_scalings_differ(tmp_path: Path) -> None:
    frequencies = []
    for kind in ("theta", "llama3"):
        directory = tmp_path / kind
        write_tiny_model(directory, num_layers=1, head_dim=64, rope_parameters=SCALINGS[kind])
        frequencies.append(rope_frequencies(read_model_spec(directory)))
    plain, scaled = frequencies
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8.0)  # short kept, long stretched
    assert ((ratio > 1.01) & (ratio < 7.9)).any()  # a blend between


@pytest.mark.parametrize("head_dim", [16, 64])
def test_bits_of_a_row_do_not_depend_on_the_rows_beside_it(head_dim: int) -> None:
    frequencies = 1.0 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
    table = RotaryTable(frequencies, 200, CPU)
    x = torch.randn(200, 5, head_dim, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(200)
    together = table.apply(x, positions)
    for size in (1, 2, 7):
        parts = [table.apply(x[r : r + size], positions[r : r + size]) for r in range(0, 200, size)]
        assert torch.equal(torch.cat(parts), together), f"{size} rows at a time"


def test_rotation_keeps_lengths_and_position_zero() -> None:
    frequencies = 1.0 / 10_000 ** (torch.arange(0, 16, 2) / 16)
    x = torch.randn(50, 2, 16, generator=torch.Generator().manual_seed(0))
    rotated = RotaryTable(frequencies, 50, CPU).apply(x, torch.arange(50))
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[0], x[0])
