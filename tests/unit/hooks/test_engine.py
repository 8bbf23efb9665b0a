"""An engine on a hooked model: answers, preemption, eviction, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.engine_model import load_for_engine
from flowprefill.errors import ConfigError, ModelLoadError, UnsupportedArchitectureError
from flowprefill.hooks.suspend import Forward
from flowprefill.request import FinishReason, TokenOutput
from tests.factories import make_request
from tests.unit.hooks.tiny import CONFIGS, make_model, prompt

WAIT_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of tiny models, each written once."""
    root = tmp_path_factory.mktemp("hooked")

    def write(name: str) -> Path:
        path = root / name
        if not path.exists():
            make_model(name).save_pretrained(path)  # type: ignore[operator]
        return path

    return write


class Answers:
    """An engine and what it said."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.outputs: dict[int, list[TokenOutput]] = {}
        self.changed = threading.Condition()
        self.stages: list[str] = []
        settings = {"dtype": "float32", "device": "cpu", "num_threads": 1, **config}
        self.engine = Engine(
            EngineConfig(model=str(path), **settings),
            self._on_output,
            lambda stage, fraction: self.stages.append(stage),
        )

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.close()

    def _on_output(self, output: TokenOutput) -> None:
        with self.changed:
            self.outputs.setdefault(output.req_id, []).append(output)
            self.changed.notify_all()

    def submit(self, req_id: int, tokens: list[int], max_tokens: int = 5) -> None:
        request = make_request(req_id=req_id, max_tokens=max_tokens)
        self.engine.submit(
            dataclasses.replace(request, prompt_token_ids=tokens, arrival_s=time.monotonic())
        )

    def wait(self, num_requests: int) -> dict[int, list[int | None]]:
        def ended() -> bool:
            return (
                sum(o[-1].finish_reason is not None for o in self.outputs.values()) >= num_requests
            )

        with self.changed:
            assert self.changed.wait_for(ended, WAIT_S), "requests do not end"
        assert all(
            o[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            for o in self.outputs.values()
        )
        return {i: [o.token_id for o in outputs] for i, outputs in self.outputs.items()}


def greedy(name: str, tokens: list[int], count: int, **more: Any) -> list[int]:
    """By the model itself, without a cache."""
    model, found = make_model(name, **more), list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            found.append(int(model(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


@pytest.mark.parametrize("name", ["Mixtral", "Mamba"])
def test_models_without_a_native_program_are_hooked_and_give_the_model_s_tokens(
    name: str, folder: Callable[[str], Path]
) -> None:
    prompts = {1: prompt(90, seed=1), 2: prompt(5, seed=2), 3: prompt(30, seed=3)}
    with Answers(folder(name)) as answers:
        assert sum("no native program" in stage for stage in answers.stages) == 1
        assert answers.engine.info.architecture == f"{name}ForCausalLM"
        for req_id, tokens in prompts.items():
            answers.submit(req_id, tokens)
        found = answers.wait(3)
        expected = {i: greedy(name, tokens, 5) for i, tokens in prompts.items()}
        for i, tokens in found.items():
            assert tokens == expected[i][: len(tokens)]
        assert answers.engine.stats().num_kv_blocks_used == 0


def test_hooked_and_native_give_the_same_tokens(folder: Callable[[str], Path]) -> None:
    found = []
    for program in ("native", "hooks"):
        with Answers(folder("Llama"), program=program) as answers:
            for i in range(4):
                answers.submit(i, prompt(20 + 30 * i, seed=i), max_tokens=8)
            found.append(answers.wait(4))
    assert found[0] == found[1]


def test_a_later_load_takes_the_profile_of_the_first(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("flowprefill.hooks.predictor._STEADY", float("inf"))
    stages = []
    for _ in range(2):
        with Answers(folder("Mixtral")) as answers:
            stages.append(answers.stages)
    assert "profile" in stages[0] and "profile from the cache" not in stages[0]
    assert "profile" not in stages[1] and "profile from the cache" in stages[1]


def test_predictions_grow_with_the_prompt_and_sum_over_passes(
    folder: Callable[[str], Path],
) -> None:
    with Answers(folder("Llama"), program="hooks", max_model_len=250) as answers:
        predictor = answers.engine._predictor
        seconds = [predictor.prefill_s(n) for n in (1, 50, 100, 249)]
        assert seconds == sorted(seconds) and seconds[0] > 0
        assert predictor.packed_prefill_s([(50, 0), (100, 0)]) == pytest.approx(
            seconds[1] + seconds[2]
        )
        assert 0 < predictor.decode_step_s(1, 50) <= predictor.decode_step_s(4, 400)
        assert predictor.saturation_tokens == 1


def test_evicted_sequences_begin_again(folder: Callable[[str], Path]) -> None:
    """Room for two requests, four of which want to decode at once."""
    per_token = 3 * 2 * 2 * 8 * 4
    settings = {"program": "hooks", "max_model_len": 96, "kv_cache_memory_bytes": 224 * per_token}
    with Answers(folder("Llama"), **settings) as answers:
        for i in range(4):
            answers.submit(i, prompt(40, seed=i), max_tokens=50)
        found = answers.wait(4)
        program = answers.engine._model.program
        assert answers.engine.stats().num_evictions > 0
    for i, tokens in found.items():
        assert tokens == greedy("Llama", prompt(40, seed=i), 50)[: len(tokens)]
    assert len(program.sequences) <= 1  # type: ignore[union-attr]


def test_a_cancelled_prefill_is_unwound_where_it_is_parked(folder: Callable[[str], Path]) -> None:
    """Parked behind a more urgent one, then cancelled: its stack and its cache are gone."""
    with Answers(folder("Llama"), program="hooks") as answers:
        forwards: list[weakref.ref[Forward]] = []
        lm, engine = answers.engine._model.program.lm, answers.engine  # type: ignore[union-attr]
        start = lm.start

        def start_and_cancel(tokens: Sequence[int], *more: object) -> Forward:
            forward: Forward = start(tokens, *more)
            if len(tokens) == 200:
                forwards.append(weakref.ref(forward))
                engine.cancel(1)
                answers.submit(2, prompt(5))
            return forward

        lm.start = start_and_cancel
        answers.submit(1, prompt(200))
        with answers.changed:
            assert answers.changed.wait_for(lambda: 2 in answers.outputs, WAIT_S)
        assert answers.outputs[1][-1].finish_reason is FinishReason.CANCELLED
        assert forwards[0]() is None
        assert engine.stats().pass_bytes == 0


def test_an_override_says_which_modules_are_boundaries(folder: Callable[[str], Path]) -> None:
    def num_slices(**config: Any) -> int:
        values = {"model": str(folder("Llama")), "program": "hooks", "dtype": "float32"}
        settings = EngineConfig.from_dict({**values, "device": "cpu", **config})
        from flowprefill.clock import MonotonicClock

        loaded = load_for_engine(settings, MonotonicClock(), lambda stage, fraction: None)
        assert not loaded.config.enable_prefix_caching
        return loaded.model.program.lm.num_slices  # type: ignore[union-attr]

    assert num_slices() == 7
    assert num_slices(hook_boundaries=["LlamaDecoderLayer"]) == 4
    with pytest.raises(ConfigError, match=r"hook_boundaries: .* 'Lineal'"):
        num_slices(hook_boundaries=["Lineal"])


@pytest.mark.parametrize("program", ["auto", "hooks"])
@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5",
          "is_encoder_decoder": True}, "T5ForConditionalGeneration is an encoder-decoder"),
        ({"architectures": ["NovelForCausalLM"], "model_type": "novel",
          "auto_map": {"AutoModelForCausalLM": "novel.NovelForCausalLM"}},
         "NovelForCausalLM comes with code of its own"),
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"},
         r"BertForMaskedLM \(model_type 'bert'\) is no causal LM"),
    ],
)  # fmt: skip
def test_unsupported_models_are_refused_by_name(
    keys: dict[str, Any], problem: str, program: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(keys))
    with pytest.raises(UnsupportedArchitectureError, match=problem):
        Answers(tmp_path, program=program)


def test_missing_weights_are_refused_by_name(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("Phi3"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 tensors are missing, such as '.*layers\.1\.mlp"):
        Answers(tmp_path)


def test_gguf_files_are_refused_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedArchitectureError, match="export-hf"):
        Answers(tmp_path / "model.gguf", program="hooks")


def test_native_is_native_or_an_error(folder: Callable[[str], Path]) -> None:
    assert "Mamba" in CONFIGS
    with pytest.raises(UnsupportedArchitectureError, match="MambaForCausalLM"):
        Answers(folder("Mamba"), program="native")


def test_weights_without_a_place_are_named(folder: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(folder("Phi3"), tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with Answers(tmp_path) as answers:
        [line] = [stage for stage in answers.stages if "no place" in stage]
        assert "1 tensors" in line and "model.layers.1.mlp.extra.weight" in line
