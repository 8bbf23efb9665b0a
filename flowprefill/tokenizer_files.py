"""Reads a tokenizer from a GGUF file or a Hugging Face directory. Knows nothing of requests.

A tokenizer that cannot be rebuilt exactly is refused by name: ids that are off by one split give a
model that works a little worse, and nobody is told.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from flowprefill.errors import ModelLoadError, UnsupportedTokenizerError
from flowprefill.gguf_file import GgufFile

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_GGUF_NAMES = dict(zip(_NAMED_TOKENS, ("bos", "eos", "unknown", "padding"), strict=True))
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # tokenizer.ggml.token_type

_LLAMA3_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_REGEX = _LLAMA3_REGEX.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class TokenizerParts:
    """What a tokenizer's files say."""

    backend: tokenizers.Tokenizer
    """Adds BOS where the model asks for it; its special tokens are registered as such."""
    named_tokens: dict[str, str]
    """Text of bos_token, eos_token, unk_token and pad_token, as far as they exist."""
    chat_template: str | None
    """Jinja source."""


@dataclass(frozen=True)
class _PreTokenizerRule:
    """What one value of tokenizer.ggml.pre stands for, as in the release it is named after."""

    pre_tokenizer: PreTokenizer
    normalizer: normalizers.Normalizer | None = None
    ignore_merges: bool = False
    """A whole word that is a token is taken as it is, without merging."""
    adds_bos: bool = False
    """Where the file does not say."""


def _split(pattern: str) -> PreTokenizer:
    return Sequence(
        [
            Split(Regex(pattern), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = ByteLevel(add_prefix_space=False, use_regex=True)
_RULES = {
    "gpt-2": _PreTokenizerRule(_GPT2),
    "smollm": _PreTokenizerRule(Sequence([Digits(individual_digits=True), _GPT2])),
    "llama-bpe": _PreTokenizerRule(_split(_LLAMA3_REGEX), ignore_merges=True, adds_bos=True),
    "qwen2": _PreTokenizerRule(_split(_QWEN2_REGEX), normalizer=normalizers.NFC()),
}


def read_tokenizer(path: Path) -> TokenizerParts:
    """Read a .gguf file, a Hugging Face directory or the tokenizer.json in one.

    Raises UnsupportedTokenizerError if its kind is not known exactly, ModelLoadError if a file is
    missing or broken.
    """
    if path.suffix == ".gguf":
        return _from_gguf(path)
    directory = path if path.is_dir() else path.parent
    if not (directory / "tokenizer.json").is_file():
        raise UnsupportedTokenizerError(
            f"{path}: neither a .gguf file nor a directory with a tokenizer.json"
        )
    return _from_directory(directory)


def _from_gguf(path: Path) -> TokenizerParts:
    metadata = {
        key.removeprefix("tokenizer."): value
        for key, value in GgufFile(path).metadata.items()
        if key.startswith("tokenizer.")
    }
    rule = _find_rule(path, metadata.get("ggml.model"), metadata.get("ggml.pre"))
    try:
        tokens, merges = metadata["ggml.tokens"], metadata["ggml.merges"]
        types = metadata["ggml.token_type"]
        backend = _byte_level_bpe(tokens, types, merges, rule)
        named_tokens = {
            name: tokens[metadata[f"ggml.{key}_token_id"]]
            for name, key in _GGUF_NAMES.items()
            if f"ggml.{key}_token_id" in metadata
        }
    except (KeyError, IndexError, TypeError) as error:
        raise ModelLoadError(f"{path}: tokenizer metadata is incomplete: {error!r}") from error
    # tokenizers raises bare Exceptions, for example for a merge of tokens that do not exist.
    except Exception as error:
        raise ModelLoadError(f"{path}: tokenizer metadata is inconsistent: {error}") from error
    _add_special_tokens(backend, named_tokens.values())
    bos_token = named_tokens.get("bos_token")
    if bos_token is not None and metadata.get("ggml.add_bos_token", rule.adds_bos):
        backend.post_processor = processors.TemplateProcessing(
            single=[bos_token, "$A"], special_tokens=[(bos_token, backend.token_to_id(bos_token))]
        )
    return TokenizerParts(backend, named_tokens, metadata.get("chat_template"))


def _find_rule(path: Path, model: str | None, pre: str | None) -> _PreTokenizerRule:
    if model == "gpt2" and pre in _RULES:
        return _RULES[pre]
    raise UnsupportedTokenizerError(
        f"{path}: tokenizer.ggml.model={model!r} with tokenizer.ggml.pre={pre!r} is not known "
        f"exactly; known: 'gpt2' with {', '.join(map(repr, sorted(_RULES)))}. Set `tokenizer` in "
        "model.json to the model's Hugging Face directory (tokenizer.json)"
    )


def _byte_level_bpe(
    tokens: list[str], types: list[int], merges: list[str], rule: _PreTokenizerRule
) -> tokenizers.Tokenizer:
    # Unused entries pad the embedding; no text may become one of them.
    vocab = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != _UNUSED
    }
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, ignore_merges=rule.ignore_merges))
    backend.pre_tokenizer = rule.pre_tokenizer
    if rule.normalizer is not None:
        backend.normalizer = rule.normalizer
    backend.decoder = decoders.ByteLevel()
    by_kind: dict[int, list[str]] = defaultdict(list)
    for text, kind in zip(tokens, types, strict=True):
        by_kind[kind].append(text)
    _add_special_tokens(backend, by_kind[_UNKNOWN] + by_kind[_CONTROL])
    # Found in any text, but not skipped when it is decoded.
    backend.add_tokens([AddedToken(text, normalized=False) for text in by_kind[_USER_DEFINED]])
    return backend


def _from_directory(directory: Path) -> TokenizerParts:
    file = directory / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise UnsupportedTokenizerError(f"{file}: cannot be loaded: {error}") from error
    # Files sometimes carry what their last training run used.
    backend.no_truncation()
    backend.no_padding()
    config = _read_json(directory / "tokenizer_config.json")
    named_tokens = {
        name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None
    }
    extra = [_token_text(token) for token in config.get("additional_special_tokens") or []]
    _add_special_tokens(backend, [*named_tokens.values(), *extra])
    return TokenizerParts(backend, named_tokens, _chat_template(directory, config))


def _add_special_tokens(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Let these tokens be special: found in raw text, skipped when text is decoded.

    Tokens that have no id are left out: a new id would lie outside the model's embedding.
    """
    special = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    missing = [t for t in texts if t not in special and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several templates by name
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template


def _token_text(token: str | dict[str, Any]) -> str:
    """A token of tokenizer_config.json: its text, or an object with it under `content`."""
    return token if isinstance(token, str) else str(token["content"])


def _read_json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: must hold one JSON object")
    return content
