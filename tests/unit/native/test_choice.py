"""Which operators a model gets: `kernels` of model.json, and what the native ones can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.loading import load_model
from flowprefill.native import library
from flowprefill.native.library import NativeUnavailableError, build_name
from flowprefill.programs.native_operators import NativeOperators, check_support
from flowprefill.programs.torch_operators import TorchOperators
from tests.factories import write_tiny_model
from tests.native_kernels import require_native
from tests.unit.native.decoders import make_spec
from tests.unit.programs.runs import Runner, load_quietly, random_tokens

ALL_FLAGS = frozenset({"avx512_bf16"})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2)


@pytest.fixture(scope="module")
def odd_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the native kernels do not run."""
    return write_tiny_model(tmp_path_factory.mktemp("odd"), num_layers=2, intermediate=100)


def load_and_listen(path: Path, **config: Any) -> tuple[Any, list[str]]:
    """The model, and the stages that were reported beside those of every load."""
    stages: list[str] = []

    def report(stage: str, fraction: float) -> None:
        if stage not in ("load weights", "prepare operators"):
            stages.append(stage)

    settings = EngineConfig(str(path), device="cpu", dtype="float32", num_threads=1, **config)
    return load_model(settings, report), stages


class TestSupport:
    @pytest.mark.parametrize(
        ("sizes", "problem"),
        [
            ({"hidden": 72}, "hidden_size=72: must be a multiple of 16"),
            ({"head_dim": 24}, "head_dim=24: must be a multiple of 16"),
            ({"intermediate": 100}, "intermediate_size=100: must be a multiple of 16"),
            ({"head_dim": 272}, "head_dim=272: at most 256"),
        ],
    )
    def test_shapes_that_cannot_be_run_are_named(self, sizes: dict[str, int], problem: str) -> None:
        with pytest.raises(NativeUnavailableError, match=problem):
            check_support(make_spec(**sizes), torch.float32, 16, ALL_FLAGS)

    @pytest.mark.parametrize("block_size", [1, 8, 24])
    def test_blocks_must_be_whole_groups_of_tokens(self, block_size: int) -> None:
        with pytest.raises(NativeUnavailableError, match=f"block_size={block_size}: must be"):
            check_support(make_spec(), torch.float32, block_size, ALL_FLAGS)

    def test_bf16_needs_its_instructions(self) -> None:
        check_support(make_spec(), torch.float32, 16, frozenset())
        with pytest.raises(NativeUnavailableError, match="bfloat16 needs avx512_bf16"):
            check_support(make_spec(), torch.bfloat16, 16, frozenset())

    def test_bf16_is_left_to_torch_where_there_is_amx(self) -> None:
        flags = ALL_FLAGS | {"amx_bf16"}
        check_support(make_spec(), torch.float32, 16, flags)
        with pytest.raises(NativeUnavailableError, match="AMX"):
            check_support(make_spec(), torch.bfloat16, 16, flags)


class TestLoad:
    def test_auto_takes_the_native_kernels_where_they_run(self, directory: Path) -> None:
        require_native("float32")
        model, stages = load_and_listen(directory)
        assert isinstance(model.program.operators, NativeOperators)
        assert model.kernels == f"native {build_name()}"
        assert model.cache.is_packed and stages == []

    def test_torch_is_torch(self, directory: Path) -> None:
        model, stages = load_and_listen(directory, kernels="torch")
        assert isinstance(model.program.operators, TorchOperators)
        assert model.kernels == "torch"
        assert not model.cache.is_packed and stages == []

    def test_auto_takes_torch_elsewhere_and_says_why_once(self, odd_directory: Path) -> None:
        model, stages = load_and_listen(odd_directory)
        assert model.kernels == "torch" and not model.cache.is_packed
        reason = "intermediate_size=100: must be a multiple of 16"
        assert stages == [f"no native kernels, torch's operators instead: {reason}"]

    def test_a_block_size_that_they_do_not_take_counts_too(self, directory: Path) -> None:
        model, stages = load_and_listen(directory, block_size=8)
        assert model.kernels == "torch" and not model.cache.is_packed
        assert len(stages) == 1 and "block_size=8: must be a multiple of 16" in stages[0]

    def test_native_is_refused_elsewhere_with_the_reason(self, odd_directory: Path) -> None:
        reason = "kernels='native': intermediate_size=100: must be a multiple of 16"
        with pytest.raises(ConfigError, match=reason):
            load_and_listen(odd_directory, kernels="native")

    def test_without_a_compiler_auto_takes_torch_and_native_is_refused(
        self, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        require_native("float32")
        library.load_library.cache_clear()
        monkeypatch.setattr(library, "_find", lambda instructions: None)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        model, stages = load_and_listen(directory)
        assert model.kernels == "torch"
        assert len(stages) == 1 and "no C++ compiler" in stages[0]
        with pytest.raises(ConfigError, match=r"kernels='native': no C\+\+ compiler"):
            load_and_listen(directory, kernels="native")

    def test_both_give_nearly_the_same_logits(self, directory: Path) -> None:
        prompt = random_tokens(100)
        ours, theirs = (
            Runner(load_quietly(directory, kernels=kernels)).prefill(prompt)
            for kernels in ("native", "torch")
        )
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
