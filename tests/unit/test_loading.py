"""From model.json to a model that can run, and what is refused with its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError, ModelLoadError
from flowprefill.granularity import Granularity
from flowprefill.host_memory import available_bytes
from flowprefill.loading import (
    LoadedModel,
    kv_cache_bytes,
    live_bytes_per_token,
    load_model,
    num_kv_blocks,
)
from flowprefill.programs.slices import SliceLimits
from tests.factories import write_tiny_gguf, write_tiny_model
from tests.unit.programs.runs import Runner, load_quietly, random_tokens
from tests.unit.programs.test_slices import make_spec

MAX_LEN = 512
BLOCK_BYTES = 2 * 3 * 16 * (2 * 16) * 4
"""K and V of 3 layers, 16 tokens of 2 heads of 16 fp32 values."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), max_len=MAX_LEN)


def load(path: Path, **config: Any) -> LoadedModel:
    return load_quietly(path, **config)


class TestKVCacheSize:
    def test_a_cpu_has_room_for_four_requests_unless_told(self, directory: Path) -> None:
        assert load(directory).cache.num_blocks == 4 * MAX_LEN // 16

    def test_a_shorter_max_model_len_needs_fewer_blocks(self, directory: Path) -> None:
        model = load(directory, max_model_len=100)
        assert model.cache.num_blocks == 4 * 7  # 100 tokens in blocks of 16

    def test_the_given_memory_is_used_and_not_exceeded(self, directory: Path) -> None:
        for extra in (0, 1, BLOCK_BYTES - 1):
            model = load(directory, kv_cache_memory_bytes=40 * BLOCK_BYTES + extra)
            assert model.cache.num_blocks == 40
        in_blocks = model.cache.k[:, :40].nbytes + model.cache.v[:, :40].nbytes
        assert in_blocks == 40 * BLOCK_BYTES

    def test_bf16_blocks_take_half_the_memory(self, directory: Path) -> None:
        model = load(directory, dtype="bfloat16", kv_cache_memory_bytes=40 * BLOCK_BYTES)
        assert model.cache.num_blocks == 80

    def test_it_may_hold_less_than_max_model_len(self, directory: Path) -> None:
        model = load(directory, kv_cache_memory_bytes=MAX_LEN // 2 // 16 * BLOCK_BYTES)
        assert model.cache.num_blocks == MAX_LEN // 2 // 16

    @pytest.mark.parametrize(("max_model_len", "num_blocks"), [(MAX_LEN, 16), (100, 7), (17, 2)])
    def test_too_small_a_memory_is_refused_with_the_numbers(
        self, directory: Path, max_model_len: int, num_blocks: int
    ) -> None:
        """256 tokens at least, or max_model_len if that is less."""
        need = num_blocks * BLOCK_BYTES
        model = load(directory, max_model_len=max_model_len, kv_cache_memory_bytes=need)
        assert model.cache.num_blocks == num_blocks
        message = rf"kv_cache_memory_bytes={need - 1}: the KV cache needs at least {need} bytes"
        with pytest.raises(ConfigError, match=message):
            load(directory, max_model_len=max_model_len, kv_cache_memory_bytes=need - 1)

    def test_a_fraction_is_a_share_of_what_is_free(self, directory: Path) -> None:
        free = available_bytes()
        assert free is not None
        fraction = 1000 * BLOCK_BYTES / free
        num_blocks = load(directory, kv_cache_memory_fraction=fraction).cache.num_blocks
        assert 500 < num_blocks < 2000  # other processes take and give meanwhile

    def test_too_small_a_fraction_is_refused_with_the_numbers(self, directory: Path) -> None:
        need = 16 * BLOCK_BYTES
        message = (
            r"kv_cache_memory_fraction=1e-09 of \d+ free bytes: the KV cache needs at least "
            rf"{need} bytes"
        )
        with pytest.raises(ConfigError, match=message):
            load(directory, kv_cache_memory_fraction=1e-9)

    @pytest.mark.parametrize(
        ("need", "free", "expected"),
        [
            (100, None, 400),
            (100, 800, 400),
            (100, 600, 300),  # half of it
            (100, 150, 100),  # one request is more than half
            (100, 99, 99),  # does not fit
        ],
    )
    def test_a_cpu_gives_half_of_what_is_free_by_default_if_one_request_fits(
        self, need: int, free: int | None, expected: int
    ) -> None:
        memory, setting = kv_cache_bytes(EngineConfig("m"), need, free)
        assert (memory, setting) == (expected, f"kv_cache_memory_bytes={expected} by default")

    def test_a_card_gives_what_its_utilization_leaves(self) -> None:
        config = EngineConfig("m", gpu_memory_utilization=0.75)
        expected = (550, "gpu_memory_utilization=0.75 leaves 550")
        assert kv_cache_bytes(config, 100, 800, 1000) == expected
        config = EngineConfig("m", kv_cache_memory_fraction=0.5)
        assert kv_cache_bytes(config, 100, 800, 1000)[0] == 400

    @pytest.mark.parametrize(("granularity", "live_values"), [("tile", 3584), ("op", 2 * 3584)])
    def test_a_card_has_room_for_what_begun_prefills_hold_beside_their_blocks(
        self, granularity: str, live_values: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Shapes of Qwen2.5-7B on 80 GB: in the order of `op` a fourth of the K and V."""
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (64 * 10**9, 80 * 10**9))
        spec = replace(
            make_spec(), num_layers=28, hidden_size=3584, num_heads=28, num_kv_heads=4, head_dim=128
        )

        def num_blocks(**config: Any) -> int:
            config = {"granularity": granularity, "block_size": 16, **config}
            card = torch.device("cuda", 0)
            return num_kv_blocks(EngineConfig("m", **config), spec, torch.bfloat16, card)

        kv_bytes = 16 * 2 * (28 * 2 * 4 * 128)
        block_bytes = kv_bytes + 16 * 2 * live_values
        assert num_blocks(gpu_memory_utilization=0.9) == 56 * 10**9 // block_bytes
        # sizes of the KV cache itself are what they say
        assert num_blocks(kv_cache_memory_bytes=40 * kv_bytes) == 40
        assert num_blocks(kv_cache_memory_fraction=0.5) == 32 * 10**9 // kv_bytes

    @pytest.mark.parametrize(("granularity", "rows_of_q"), [("tile", 64), ("op", 0)])
    def test_what_a_begun_prefill_holds_of_a_token_is_what_is_counted(
        self, granularity: str, rows_of_q: int, directory: Path
    ) -> None:
        limits = SliceLimits(tile_rows=64, attention_work=64 * 64)
        model = load_quietly(directory, kernels="torch", limits=limits)
        inputs = [Runner(model).input(random_tokens(300))]
        state = model.program.prefill(inputs, Granularity.parse(granularity))
        config = EngineConfig("m", granularity=granularity)
        counted = 300 * live_bytes_per_token(config, model.spec, model.dtype)
        assert state.live_bytes == counted + rows_of_q * model.spec.q_size * model.dtype.itemsize

    def test_a_share_of_an_unknown_amount_is_refused(self) -> None:
        config = EngineConfig("m", kv_cache_memory_fraction=0.5)
        with pytest.raises(ConfigError, match=r"_fraction=0.5: the system does not"):
            kv_cache_bytes(config, 100, None)


class TestMaxModelLen:
    def test_it_is_the_models_limit_unless_told(self, directory: Path) -> None:
        assert load(directory).spec.max_position_embeddings == MAX_LEN
        assert load(directory, max_model_len=MAX_LEN).spec.max_position_embeddings == MAX_LEN
        assert load(directory, max_model_len=100).spec.max_position_embeddings == 100

    def test_over_the_models_limit_is_refused_with_both(self, directory: Path) -> None:
        message = rf"max_model_len={MAX_LEN + 1}: the model's limit is {MAX_LEN}"
        with pytest.raises(ConfigError, match=message):
            load(directory, max_model_len=MAX_LEN + 1)

    def test_room_for_no_answer_is_refused(self, directory: Path) -> None:
        with pytest.raises(ConfigError, match="max_model_len=1: must hold a prompt and its answer"):
            load(directory, max_model_len=1)


class TestDtype:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_weights_and_cache_have_the_dtype_asked_for(self, directory: Path, dtype: str) -> None:
        model = load(directory, dtype=dtype)
        expected = getattr(torch, dtype)
        assert model.dtype == model.cache.k.dtype == expected

    @pytest.mark.parametrize("has_bf16", [True, False])
    def test_auto_is_what_the_device_multiplies_natively(
        self, directory: Path, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has_bf16)
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        expected = torch.bfloat16 if has_bf16 else torch.float32
        assert load(directory, dtype="auto").dtype == expected


def test_progress_names_its_stages_and_ends_at_one(directory: Path) -> None:
    calls: list[tuple[str, float]] = []
    load_model(
        EngineConfig(model=str(directory), device="cpu", num_threads=1, kernels="torch"),
        lambda stage, fraction: calls.append((stage, fraction)),
    )
    stages = list(dict.fromkeys(stage for stage, _ in calls))
    assert stages == ["load weights", "prepare operators"]
    for stage in stages:
        fractions = [fraction for name, fraction in calls if name == stage]
        assert fractions == sorted(fractions) and fractions[-1] == 1.0


def test_a_missing_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere'?: not found"):
        load(tmp_path / "nowhere")


def test_cuda_without_a_card_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device='cuda'"):
        load_model(EngineConfig(model=str(directory), device="cuda"), lambda stage, fraction: None)


def test_a_gguf_file_and_its_directory_give_the_same_logits(
    directory: Path, tmp_path: Path
) -> None:
    file = write_tiny_gguf(tmp_path / "model.gguf", directory)
    prompt = random_tokens(30)
    ours, theirs = (Runner(load(path)).prefill(prompt) for path in (file, directory))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("kernels", "block_size"),
    [*[("torch", n) for n in (1, 16, 48, 1024)], *[("native", n) for n in (16, 48, 1024)]],
)
def test_the_block_size_changes_no_logit(directory: Path, kernels: str, block_size: int) -> None:
    prompt = random_tokens(100)
    model = load(directory, block_size=block_size, kernels=kernels)
    assert model.cache.block_size == block_size
    expected = Runner(load(directory, kernels=kernels)).prefill(prompt)
    assert torch.equal(Runner(model).prefill(prompt), expected)
