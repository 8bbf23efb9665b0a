"""What is read of a model's folder, and how its cache is counted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from flowprefill.bench.hooks_run import HookBench
from flowprefill.config import EngineConfig
from flowprefill.errors import ConfigError, ModelLoadError, UnsupportedArchitectureError
from flowprefill.hooks.availability import HookedSpec
from flowprefill.hooks.batch_cache import joined
from flowprefill.hooks.causal_lm import CausalLM
from flowprefill.hooks.loading import _with_logits_of, tile_rows
from tests.unit.hooks.test_engine import Answers, greedy
from tests.unit.hooks.test_fallback import write
from tests.unit.hooks.tiny import CONFIGS, VOCAB, make_model, prompt

MAX_TOKENS = 256
"""Longest sequence of a tiny model."""
_ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
STRETCHED: dict[str, dict[str, Any]] = {
    "yarn": {**_ROPE, "rope_type": "yarn", "original_max_position_embeddings": 64},
    "dynamic": {**_ROPE, "rope_type": "dynamic"},
}


def said_by(model: nn.Module, tokens: list[int], count: int = 5) -> list[int]:
    """Greedy tokens behind a prompt, without a cache."""
    found = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            found.append(int(model(input_ids=torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(tokens) :]


def see_images(path: Path) -> nn.Module:
    """A tiny model of text and images, and its folder."""
    text = {**CONFIGS["Gemma3"], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3,
            "max_position_embeddings": MAX_TOKENS}  # fmt: skip
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, eos_token_id=[2, 3]
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return model.eval()


def test_a_model_that_sees_images_too_is_served_by_what_it_says_of_text(tmp_path: Path) -> None:
    model, tokens = see_images(tmp_path), prompt(40)
    with Answers(tmp_path) as answers:
        info = answers.engine.info
        assert info.architecture == "Gemma3ForConditionalGeneration"
        assert (info.max_model_len, info.vocab_size) == (MAX_TOKENS, VOCAB)
        assert info.eos_token_ids == [2, 3]
        answers.submit(1, tokens)
        [found] = answers.wait(1).values()
    assert found == said_by(model, tokens)[: len(found)]
    bench = HookBench(EngineConfig(str(tmp_path), num_threads=1, program="hooks"))
    assert bench.max_tokens == MAX_TOKENS


def test_what_config_json_says_is_judged_before_weights_are_read(tmp_path: Path) -> None:
    write(tmp_path, "Mixtral", {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="max_model_len=257: the model's limit is 256"):
        Answers(tmp_path, max_model_len=257)


def test_code_of_its_own_beside_a_model_that_transformers_has_is_not_run(tmp_path: Path) -> None:
    names = {"AutoConfig": "own.Phi3Config", "AutoModelForCausalLM": "own.Phi3ForCausalLM"}
    write(tmp_path, "Phi3", {}, auto_map=names)
    (tmp_path / "own.py").write_text("raise SystemExit")
    tokens = prompt(20)
    with Answers(tmp_path) as answers:
        answers.submit(1, tokens)
        [found] = answers.wait(1).values()
    assert found == greedy("Phi3", tokens, 5)[: len(found)]


def test_a_limit_by_another_name_is_the_model_s(tmp_path: Path) -> None:
    config = transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=VOCAB, eos_token_id=2
    )
    model = transformers.MptForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    tokens = prompt(60)
    with Answers(tmp_path) as answers:
        assert answers.engine.info.max_model_len == 64
        answers.submit(1, tokens, max_tokens=4)
        [found] = answers.wait(1).values()
    assert found == said_by(model, tokens)[: len(found)]
    with pytest.raises(ConfigError, match="max_model_len=65: the model's limit is 64"):
        Answers(tmp_path, max_model_len=65)


@pytest.mark.parametrize("kind", STRETCHED)
def test_a_stretched_context_can_be_used(kind: str, tmp_path: Path) -> None:
    more = {"rope_parameters": STRETCHED[kind], "max_position_embeddings": 64}
    write(tmp_path, "Llama", more)
    tokens = prompt(200)
    with Answers(tmp_path) as answers:
        assert answers.engine.info.max_model_len == 4 * 64
        answers.submit(1, tokens)
        [found] = answers.wait(1).values()
    assert found == greedy("Llama", tokens, 5, **more)[: len(found)]
    with pytest.raises(ConfigError, match="max_model_len=257: the model's limit is 256"):
        Answers(tmp_path, max_model_len=257)


def test_token_ids_that_end_an_answer_are_the_model_s(tmp_path: Path) -> None:
    write(tmp_path, "Mixtral", {})
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 0}))
    with Answers(tmp_path) as answers:
        assert answers.engine.info.eos_token_ids == [0]
    generation.write_text(json.dumps({"eos_token_id": [2, VOCAB]}))
    with pytest.raises(ModelLoadError, match=f"eos_token_id={VOCAB}: outside the {VOCAB} ids"):
        Answers(tmp_path)
    generation.write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ModelLoadError, match="eos_token_id='</s>': must be a token id"):
        Answers(tmp_path)


def test_a_model_that_gives_fewer_logits_has_fewer_tokens_to_choose_from() -> None:
    model: Any = make_model("Llama")
    model.lm_head = nn.Linear(32, 90, bias=False)
    spec = HookedSpec("LlamaForCausalLM", MAX_TOKENS, VOCAB, (2,))
    assert _with_logits_of(CausalLM(model), spec).vocab_size == 90
    ends_beyond = HookedSpec("LlamaForCausalLM", MAX_TOKENS, VOCAB, (95,))
    with pytest.raises(ModelLoadError, match="eos_token_id=95: outside the 90 ids"):
        _with_logits_of(CausalLM(model), ends_beyond)
    narrow = HookedSpec("LlamaForCausalLM", MAX_TOKENS, 80, (2,))
    with pytest.raises(ModelLoadError, match="90 logits, but vocab_size=80"):
        _with_logits_of(CausalLM(model), narrow)


def make_hybrid() -> nn.Module:
    """Two layers with a recurrent state, and one with keys and values between them."""
    config = transformers.BambaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=MAX_TOKENS,
        attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.BambaForCausalLM(config).eval()


@pytest.mark.parametrize("name", ["Bamba", "Mamba"])
def test_a_recurrent_state_counts_once_in_a_sequence(name: str, tmp_path: Path) -> None:
    """With the memory of two sequences, at least one fits, and at most four begin."""
    model: Any = make_hybrid() if name == "Bamba" else make_model("Mamba")
    model.save_pretrained(tmp_path)
    lm = CausalLM(model)
    assert lm.sequence_bytes > 0 and not lm.is_continued
    memory = 2 * (lm.sequence_bytes + MAX_TOKENS * lm.token_bytes)
    settings = {"max_model_len": MAX_TOKENS, "kv_cache_memory_bytes": memory}
    tokens = prompt(MAX_TOKENS - 5)
    with Answers(tmp_path, **settings) as answers:
        info = answers.engine.info
        assert info.num_kv_blocks * info.block_size >= MAX_TOKENS
        assert info.num_kv_blocks * lm.sequence_bytes <= memory
        for i in range(3):
            answers.submit(i, tokens)
        found = answers.wait(3)
    expected = said_by(model, tokens)
    assert all(one == expected[: len(one)] for one in found.values())


def test_eager_attention_sees_few_rows_at_once_on_cuda_too() -> None:
    cuda: Any = SimpleNamespace(torch_device=torch.device("cuda"))
    cpu: Any = SimpleNamespace(torch_device=torch.device("cpu"))
    config: Any = make_model("Llama").config
    for kind, rows in (("sdpa", 2048), ("eager", 256)):
        config._attn_implementation = kind
        assert (tile_rows(cuda, config), tile_rows(cpu, config)) == (rows, 256)


def test_masks_are_as_long_by_positions_as_by_their_number() -> None:
    """transformers 4 passes the positions of the queries, transformers 5 how many there are."""
    lm = CausalLM(make_model("Llama"))
    caches = []
    for length in (5, 9):
        forward = lm.start(prompt(length), None)
        forward.run(lambda: False)
        caches.append(lm.cache_of(forward))
    layer = joined(caches).layers[0]
    assert layer.get_mask_sizes(1) == layer.get_mask_sizes(torch.tensor([9])) == (10, 0)


def test_transformers_that_is_too_old_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "Mixtral", {})
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.46.3")
    with pytest.raises(UnsupportedArchitectureError, match=r">= 4\.57; 4\.46\.3 is installed"):
        Answers(tmp_path)
