"""What the native program of an architecture cannot run is hooked by itself; the log says why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowprefill.errors import ConfigError, ModelLoadError, UnsupportedArchitectureError
from tests.unit.hooks.test_engine import Answers, greedy
from tests.unit.hooks.tiny import make_model, prompt

_ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "attention_bias=True": ("Llama", {"attention_bias": True}),
    "mlp_bias=True": ("Llama", {"mlp_bias": True}),
    "hidden_act='gelu'": ("Llama", {"hidden_act": "gelu"}),
    "rope_type='yarn'": (
        "Llama",
        {"rope_parameters": {**_ROPE, "rope_type": "yarn", "original_max_position_embeddings": 64}},
    ),
    "rope_type='dynamic'": ("Qwen2", {"rope_parameters": {**_ROPE, "rope_type": "dynamic"}}),
}
WINDOW = 64
WINDOWED: dict[str, dict[str, Any]] = {
    "Mistral": {"sliding_window": WINDOW},
    "Qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
}


def write(directory: Path, name: str, more: dict[str, Any], **keys: Any) -> Path:
    """A tiny model; keys: of its config.json, changed afterwards."""
    make_model(name, **more).save_pretrained(directory)  # type: ignore[operator]
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return directory


def fallbacks(answers: Answers) -> list[str]:
    return [stage for stage in answers.stages if "no native program" in stage]


@pytest.mark.parametrize("problem", VARIANTS)
def test_a_variant_is_hooked_and_gives_the_model_s_tokens(problem: str, tmp_path: Path) -> None:
    name, more = VARIANTS[problem]
    write(tmp_path, name, more)
    prompts = {1: prompt(90, seed=1), 2: prompt(5, seed=2)}
    with Answers(tmp_path) as answers:
        [line] = fallbacks(answers)
        assert f"{name}ForCausalLM" in line and problem in line and "hooked" in line
        for req_id, tokens in prompts.items():
            answers.submit(req_id, tokens)
        for i, found in answers.wait(2).items():
            assert found == greedy(name, prompts[i], 5, **more)[: len(found)]


@pytest.mark.parametrize("problem", VARIANTS)
def test_native_refuses_a_variant_by_name(problem: str, tmp_path: Path) -> None:
    write(tmp_path, *VARIANTS[problem])
    with pytest.raises(ModelLoadError) as caught:
        Answers(tmp_path, program="native")
    assert problem in str(caught.value) and "hooked" not in str(caught.value)


@pytest.mark.parametrize("name", WINDOWED)
def test_sequences_longer_than_a_window_are_hooked(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, WINDOWED[name])
    tokens = prompt(90)
    with Answers(tmp_path) as answers:
        [line] = fallbacks(answers)
        assert f"sliding_window={WINDOW}" in line
        assert answers.engine.info.max_model_len == 256
        answers.submit(1, tokens)
        [found] = answers.wait(1).values()
    assert found == greedy(name, tokens, 5, **WINDOWED[name])[: len(found)]


def test_sequences_within_a_window_are_native(tmp_path: Path) -> None:
    write(tmp_path, "Mistral", WINDOWED["Mistral"])
    with Answers(tmp_path, max_model_len=WINDOW) as answers:
        assert not fallbacks(answers)
        assert "transformers" not in answers.engine.info.kernels
    with pytest.raises(ConfigError, match=f"max_model_len=100: the model's limit is {WINDOW}"):
        Answers(tmp_path, max_model_len=100, program="native")


def test_without_greenlet_a_windowed_model_ends_at_its_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    write(tmp_path, "Mistral", WINDOWED["Mistral"])
    with Answers(tmp_path) as answers:
        assert answers.engine.info.max_model_len == WINDOW
        assert [s for s in answers.stages if "sliding_window=64" in s and "package greenlet" in s]
    with pytest.raises(UnsupportedArchitectureError, match=r"sliding_window=64.*greenlet"):
        Answers(tmp_path, max_model_len=100)


def test_without_greenlet_a_variant_is_refused_with_both_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    write(tmp_path, *VARIANTS["mlp_bias=True"])
    with pytest.raises(UnsupportedArchitectureError, match=r"mlp_bias=True.*package greenlet"):
        Answers(tmp_path)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"hidden_act": "no_such_function"}, "hidden_act='no_such_function'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config="),
        ({"rope_scaling": {"rope_type": "no_such_kind", "factor": 2.0}}, "rope_type="),
    ],
)
def test_what_transformers_cannot_run_either_is_refused_with_both_reasons(
    keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write(tmp_path, "Llama", {}, **keys)
    with pytest.raises(ModelLoadError) as caught:
        Answers(tmp_path)
    native, _, hooked = str(caught.value).partition("; nor as a hooked model: ")
    assert problem in native and "is not supported" in native and hooked


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"attention_bias": "yes"}, "attention_bias='yes': must be true or false"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"quantization_config": 8}, "quantization_config=8: must be an object"),
    ],
)
def test_a_config_that_is_broken_is_an_error_and_nothing_is_hooked(
    keys: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    write(tmp_path, "Llama", {}, **keys)
    with pytest.raises(ModelLoadError) as caught:
        Answers(tmp_path)
    assert problem in str(caught.value) and "hooked" not in str(caught.value)
