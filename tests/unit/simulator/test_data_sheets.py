"""Devices and models by name: what follows from their figures, and what cannot be."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.simulator.data_sheets import (
    A100,
    A800,
    DEVICES,
    H100,
    H200,
    LLAMA_3_1_70B,
    MODELS,
    DeviceSheet,
    shard,
)
from flowprefill.simulator.platform import PAPER_PLATFORM, GpuPlatform
from flowprefill.simulator.roofline import RooflineCost
from flowprefill.workload import TraceRequest, objective

TILE = Granularity("tile")
LENGTHS = [1, 16, 700, 8192, 50_000]


def cost(device: DeviceSheet, model: str = "Llama-3.1-8B", num_ranks: int = 1) -> RooflineCost:
    return GpuPlatform(device, MODELS[model], num_ranks).cost(TILE)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_better_devices_are_quicker(num_tokens: int) -> None:
    a800, a100, h100, h200 = (cost(d).prefill_s(num_tokens) for d in (A800, A100, H100, H200))
    assert a800 == a100 > h100 >= h200
    step = [cost(d).decode_step_s(8, 8 * num_tokens) for d in (A100, H100, H200)]
    assert step[0] > step[1] > step[2]  # more bandwidth each time


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
def test_larger_models_are_slower(device: DeviceSheet) -> None:
    small, middle = (cost(device, name) for name in ("Llama-3.1-8B", "Qwen2.5-14B"))
    ours, large = (cost(device, name, 4) for name in ("Qwen2.5-14B", "Llama-3.1-70B"))
    for num_tokens in LENGTHS:
        assert small.prefill_s(num_tokens) < middle.prefill_s(num_tokens)
        assert ours.prefill_s(num_tokens) < large.prefill_s(num_tokens)


@pytest.mark.parametrize("device", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize("num_tokens", [4096, 50_000])
def test_more_ranks_are_quicker_but_never_in_proportion(
    device: DeviceSheet, num_tokens: int
) -> None:
    times = [cost(device, "Qwen2.5-14B", n).prefill_s(num_tokens) for n in (1, 2, 4, 8)]
    for before, after in itertools.pairwise(times):
        assert before / 2 < after < before


def test_ranks_pay_for_their_all_reduces() -> None:
    quick_links = dataclasses.replace(A800, name="quick", link_bandwidth=1e15)
    num_layers, rows, hidden = 80, 8192, 8192
    sent = 2 * 3 / 4 * rows * hidden * 2
    link = A800.link_bandwidth * 0.77
    expected = 2 * (num_layers - 1) * sent / link  # the last layer runs for one row
    found = cost(A800, "Llama-3.1-70B", 4).prefill_s(rows)
    found -= cost(quick_links, "Llama-3.1-70B", 4).prefill_s(rows)
    assert found == pytest.approx(expected, rel=0.01)


def test_a_rank_has_its_share_of_heads_and_products() -> None:
    rank = shard(LLAMA_3_1_70B, 8)
    assert (rank.num_heads, rank.num_kv_heads) == (8, 1)
    assert rank.intermediate_size * 8 == LLAMA_3_1_70B.intermediate_size
    assert rank.vocab_size * 8 == LLAMA_3_1_70B.vocab_size
    assert (rank.hidden_size, rank.num_layers) == (8192, 80)
    assert shard(LLAMA_3_1_70B, 16).num_kv_heads == 1  # repeated: 8 for 16 ranks


@pytest.mark.parametrize("num_ranks", [0, 3, 48])
def test_ranks_that_do_not_divide_the_model_are_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match="tensor parallel"):
        shard(LLAMA_3_1_70B, num_ranks)


def test_a_model_that_leaves_no_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="no memory is left"):
        GpuPlatform(A800, MODELS["Llama-3.1-70B"], 1)
    assert GpuPlatform(H200, MODELS["Llama-3.1-70B"], 2).num_blocks > 0


def test_the_paper_sets_objectives_by_model() -> None:
    requests = [TraceRequest(0, kind, 5000, 1) for kind in ("text", "image", "search", "file")]
    for name, expected in {
        "Llama-3.1-8B": (0.25, 0.5, 4.0, 6.0),
        "Qwen2.5-14B": (0.4, 0.8, 6.5, 9.0),
        "Llama-3.1-70B": (1.0, 2.0, 15.0, 18.0),
    }.items():
        found = [MODELS[name].objective(request) for request in requests]
        assert [goal.ttft_s for goal in found] == pytest.approx(expected)
        assert [goal.tbt_s for goal in found] == [0.1, 0.1, 0.2, 0.2]


@pytest.mark.parametrize("num_tokens", [10, 2000, 9000, 100_000])
def test_classes_by_length_have_the_objectives_of_their_kind(num_tokens: int) -> None:
    request = TraceRequest(0, "conv", num_tokens, 1)
    ours = objective(request)
    assert MODELS["Llama-3.1-8B"].objective(request) == ours
    large = MODELS["Llama-3.1-70B"].objective(request, scale=2.0)
    factor = {"short": 4.0, "medium": 4.0, "long": 15 / 4, "document": 3.0}[ours.name]
    assert large.ttft_s == pytest.approx(2 * factor * ours.ttft_s)
    assert large.tbt_s == 2 * ours.tbt_s


def test_the_default_is_the_papers_device() -> None:
    assert (PAPER_PLATFORM.device_name, PAPER_PLATFORM.model_name) == ("A800-80GB", "Llama-3.1-8B")
    assert GpuPlatform(A800, MODELS["Llama-3.1-70B"], 4).device_name == "4 x A800-80GB"
