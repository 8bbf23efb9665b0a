"""A whole model on the Triton kernels: nearly torch's logits, the same bits however it is parked.

In triton's interpreter, so the models are tiny and the prompts short.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.triton_kernels import (  # first: it skips where triton is not installed
    quick_interpreter,
    row_by_row,
)

# isort: split

from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity
from flowprefill.loading import LoadedModel, load_model
from flowprefill.programs import choice
from flowprefill.programs.slices import SliceLimits
from flowprefill.programs.triton_operators import TritonOperators, build_name, triton
from flowprefill.user_cache import user_cache_directory
from tests.factories import write_tiny_model
from tests.property.test_park_anywhere import check
from tests.unit.native.decoders import make_spec
from tests.unit.programs.runs import CPU, Runner, load_quietly, random_tokens

__all__ = ["quick_interpreter", "row_by_row"]

LIMITS = SliceLimits(tile_rows=32, attention_work=16 * 64, mlp_rows=16)
"""Several tiles, and several slices of attention and MLP in each."""
ARCHITECTURES = {"llama": {}, "qwen3": {"heads": 6}, "qwen2": {"tied": True}}

pytestmark = [
    pytest.mark.usefixtures("row_by_row", "quick_interpreter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted here"),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: write_tiny_model(tmp_path_factory.mktemp(name), name, num_layers=2, **shape)
        for name, shape in ARCHITECTURES.items()
    }


def load(directory: Path, kernels: str = "triton") -> LoadedModel:
    return load_quietly(directory, limits=LIMITS, kernels=kernels, num_threads=2)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_tokens_equal_torch_s(
    architecture: str, directories: dict[str, Path]
) -> None:
    model = load(directories[architecture])
    assert isinstance(model.program.operators, TritonOperators)
    ours = Runner(model).greedy(random_tokens(37), 3)
    theirs = Runner(load(directories[architecture], "torch")).greedy(random_tokens(37), 3)
    torch.testing.assert_close(ours[0], theirs[0], atol=1e-4, rtol=0)
    assert ours[1] == theirs[1]


@pytest.mark.parametrize("granularity", ["op", "chunk:13", "layer"])
def test_granularity_changes_no_bit(granularity: str, directories: dict[str, Path]) -> None:
    runner = Runner(load(directories["llama"]))
    prompt = random_tokens(45)
    whole, kv = runner.prefill(prompt), runner.kv(45)
    assert torch.equal(runner.prefill(prompt, Granularity.parse(granularity)), whole)
    assert torch.equal(runner.kv(45), kv)


@pytest.mark.parametrize(("architecture", "seed"), [("llama", 1), ("qwen3", 2)])
def test_parked_anywhere_and_packed_it_has_the_same_bits(
    architecture: str, seed: int, directories: dict[str, Path]
) -> None:
    check(load(directories[architecture]), [40, 17, 1], ["tile", "op", "chunk:9"], seed)


@pytest.mark.parametrize("lengths", [[9, 20, 1], [30, 40, 17]])
def test_prompts_whose_attention_shares_a_launch_have_the_bits_they_have_alone(
    lengths: list[int], directories: dict[str, Path]
) -> None:
    limits = replace(LIMITS, attention_work=32 * 48, packs_attention=True)
    model = load_quietly(directories["llama"], limits=limits, kernels="triton", num_threads=2)
    runner = Runner(model)
    prompts = [random_tokens(n, seed=n) for n in lengths]
    alone = [runner.prefill(tokens, sequence=i) for i, tokens in enumerate(prompts)]
    kv = [runner.kv(n, i) for i, n in enumerate(lengths)]
    model.cache.k.fill_(7.0)
    model.cache.v.fill_(7.0)
    inputs = [runner.input(tokens, sequence=i) for i, tokens in enumerate(prompts)]
    state = model.program.prefill(inputs, Granularity("tile"))
    most = 1
    while not state.is_done:
        most = max(most, state.next_slice.num_sequences)
        state.run_slice()
    assert most > 1
    for i, n in enumerate(lengths):
        assert torch.equal(state.logits[i], alone[i]), f"prompt {i}"
        assert torch.equal(runner.kv(n, i), kv[i]), f"prompt {i}"


def test_packed_prompts_whose_attention_shares_launches_may_be_parked_anywhere(
    directories: dict[str, Path],
) -> None:
    model = load(directories["qwen2"])
    model.program.limits = replace(LIMITS, attention_work=32 * 48, packs_attention=True)
    check(model, [12, 17, 5, 20], ["tile", "tile", "op", "layer"], 5)


class TestChoice:
    def load(self, directory: Path, **config: object) -> tuple[LoadedModel, list[str]]:
        """The model, and the stages that were reported beside those of every load."""
        stages: list[str] = []
        usual = "load weights", "prepare operators"

        def report(stage: str, fraction: float) -> None:
            if stage not in usual:
                stages.append(stage)

        settings = EngineConfig(str(directory), device="cpu", dtype="float32", **config)
        return load_model(settings, report), stages

    def test_the_kernels_name_their_compiler(self, directories: dict[str, Path]) -> None:
        model, stages = self.load(directories["llama"], kernels="triton")
        assert model.kernels == f"triton {build_name()}" and stages == []
        assert not model.cache.is_packed

    @pytest.mark.parametrize("own", [None, "/somewhere"])
    def test_compiled_kernels_are_kept_in_the_user_s_cache_unless_told_otherwise(
        self, own: str | None, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TRITON_CACHE_DIR", own or "")
        if own is None:
            monkeypatch.delenv("TRITON_CACHE_DIR")
        self.load(directories["llama"], kernels="triton")
        assert os.environ["TRITON_CACHE_DIR"] == (own or str(user_cache_directory("triton")))

    def test_auto_on_a_cpu_never_takes_them(self, directories: dict[str, Path]) -> None:
        model, _ = self.load(directories["llama"])
        assert not isinstance(model.program.operators, TritonOperators)

    def test_on_a_cpu_they_are_refused(
        self, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
        with pytest.raises(ConfigError, match="kernels='triton': they need device='cuda'"):
            self.load(directories["llama"], kernels="triton")

    def test_without_the_package_they_are_refused_by_its_name(
        self, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "flowprefill.programs.triton_operators", None)
        monkeypatch.delattr("flowprefill.programs.triton_operators")
        with pytest.raises(ConfigError, match="kernels='triton': they need the package triton"):
            self.load(directories["llama"], kernels="triton")

    def test_where_they_cannot_run_auto_on_cuda_takes_torch_and_says_why(self) -> None:
        stages: list[str] = []
        chosen = choice.choose_kernels(
            EngineConfig("model"),
            make_spec(head_dim=272),
            torch.bfloat16,
            torch.device("cuda"),
            lambda stage, fraction: stages.append(stage),
        )
        assert chosen == "torch"
        reason = "head_dim=272: at most 256"
        assert stages == [f"no Triton kernels, torch's operators instead: {reason}"]

    def test_what_a_compiler_says_is_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("Failed to find C compiler.\nAnd much more")

        monkeypatch.setattr("flowprefill.programs.triton_operators.silu_and_mul", fail)
        settings = EngineConfig("model", kernels="triton")
        with pytest.raises(ConfigError, match=r"RuntimeError: Failed to find C compiler\.$"):
            choice.choose_kernels(
                settings, make_spec(), torch.float32, CPU, lambda stage, fraction: None
            )
