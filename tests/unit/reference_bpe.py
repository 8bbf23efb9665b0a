"""Byte-level BPE straight from its definition, to hold tokenizers against."""

from __future__ import annotations

import functools
import itertools
import unicodedata

import regex
from tokenizers import pre_tokenizers

from flowprefill.gguf_file import GgufFile
from tests.unit.tokenizer_samples import default_model_path

CONTRACTIONS = r"'s|'t|'re|'ve|'m|'ll|'d"
GPT2 = (
    rf"{CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\p{{White_Space}}\p{{L}}\p{{N}}]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
LLAMA3 = (
    rf"(?i:{CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*|\p{White_Space}*[\r\n]+"
    r"|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


class ReferenceBpe:
    """Byte-level BPE straight from its definition (GPT-2), for text without control tokens."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[str],
        pattern: str,
        *,
        digits_alone: bool = False,
        ignore_merges: bool = False,
        nfc: bool = False,
    ) -> None:
        self._ids = {text: i for i, text in enumerate(tokens)}
        self._ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self._pattern = regex.compile(pattern)
        self._digits_alone = digits_alone
        self._ignore_merges = ignore_merges
        self._nfc = nfc
        self._chars = byte_chars()

    def encode(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self._nfc else text
        stretches = regex.split(r"(\p{N})", text) if self._digits_alone else [text]
        words = [word for s in stretches for word in self._pattern.findall(s)]
        assert "".join(words) == text
        in_alphabet = ("".join(self._chars[byte] for byte in word.encode()) for word in words)
        return [i for word in in_alphabet for i in self._word(word)]

    @functools.cache  # noqa: B019
    def _word(self, word: str) -> list[int]:
        if self._ignore_merges and word in self._ids:
            return [self._ids[word]]
        parts = list(word)
        while len(parts) > 1:
            pairs = list(itertools.pairwise(parts))
            best = min(range(len(pairs)), key=lambda i: self._ranks.get(pairs[i], 10**9))
            if pairs[best] not in self._ranks:
                break
            parts[best : best + 2] = ["".join(pairs[best])]
        # SmolLM2 lacks tokens for 21 bytes; the reference drops them.
        return [self._ids[part] for part in parts if part in self._ids]


def byte_chars() -> list[str]:
    """The character of each byte in byte-level BPE."""
    same = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    shifted = [byte for byte in range(256) if byte not in same]
    chars = {byte: chr(byte) for byte in same}
    chars.update({byte: chr(256 + n) for n, byte in enumerate(shifted)})
    assert set(chars.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [chars[byte] for byte in range(256)]


def default_model_reference() -> ReferenceBpe:
    """The SmolLM2 release: Digits(individual_digits) and then ByteLevel with GPT-2's regex."""
    metadata = GgufFile(default_model_path()).metadata
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    return ReferenceBpe(tokens, merges, GPT2, digits_alone=True)
