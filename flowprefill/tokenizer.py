"""Text <-> token ids of one model, from a GGUF file or a Hugging Face directory. No torch.

Every token stands for fixed bytes, so decoding is joining bytes and works token by token
(text_stream.py). Byte sequences that are no UTF-8 become U+FFFD, one per maximal invalid part.

Raw prompts may spell control tokens (`encode`), as in vLLM. Message contents may not: see
`_ContentEncoder`.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from flowprefill.chat_template import ChatTemplate
from flowprefill.config import EngineConfig
from flowprefill.errors import (
    FlowPrefillError,
    InvalidParameterError,
    UnsupportedFeatureError,
    UnsupportedTokenizerError,
)
from flowprefill.programs.model_spec import resolve_model_path
from flowprefill.tokenizer_files import TokenizerParts, read_tokenizer

_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_MAX_SHRINK = 4
"""Unicode normalisation turns at most 4 UTF-8 bytes into 1 (NFKC of a bold letter; NFC: 3)."""


class Tokenizer:
    """One model's tokenizer. Calls are thread-safe and do not change it."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        self._named_tokens = parts.named_tokens
        self._chat_template_source = parts.chat_template
        self._token_bytes = _token_bytes_table(parts.backend)
        added = parts.backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids that skip_special_tokens leaves out of text."""
        self.vocab_size = len(self._token_bytes)
        """One more than the largest id that stands for something; the model's may be padded."""
        shrink = 1 if parts.backend.normalizer is None else _MAX_SHRINK
        self.max_token_bytes = shrink * max(map(len, self._token_bytes))
        """UTF-8 bytes of text per token at most: longer text than n times this has more than n
        tokens, whitespace that a special token swallows aside."""

    @staticmethod
    def load(path: Path) -> Tokenizer:
        """Load from a .gguf file, or a Hugging Face directory with tokenizer.json.

        Raises UnsupportedTokenizerError naming what is not known exactly, ModelLoadError if a file
        is missing or broken.
        """
        return Tokenizer(read_tokenizer(path))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw prompt; text that spells a special token becomes that token.

        add_special_tokens puts BOS in front where the model asks for it. An embedded NUL is a
        character like any other. Raises InvalidParameterError for lone surrogates.
        """
        _check_text("text_input", text)
        return _encode(self._backend, text, add_special_tokens)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of text in which nothing is a control token, whatever it spells."""
        _check_text("text", text)
        return self._content_encoder.encode(self._content_encoder.escape(text))

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens where they follow others.

        So SentencePiece models keep the space that they put in front of every text. Ids without a
        token (a model's padding rows) stand for no text.
        """
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        joined = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; part of a character possibly."""
        return self._token_bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def token_text(self, token_id: int) -> str:
        """One token as text of its own, special tokens included: `decoded_token` of logprobs."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a chat, in the form the model was trained on.

        Each message has a role (a word) and a content (text); more keys are the template's.
        Control tokens come from the template alone. Raises InvalidParameterError naming the
        message, InvalidRequestError if the template refuses them, UnsupportedFeatureError if the
        model has no chat template.
        """
        _check_messages(messages)
        if self._chat_template is None:
            raise UnsupportedFeatureError("messages", "chat with a model without chat template")
        encoder = self._content_encoder
        escaped = [
            {key: value if key == "role" else encoder.escape(value) for key, value in m.items()}
            for m in messages
        ]
        rendered = self._chat_template.render(escaped, add_generation_prompt)
        _check_text("messages", rendered)  # keys other than content
        return encoder.encode(rendered)

    def warm_up(self) -> None:
        """Do now what the first chat would wait for: tenths of a second with a large vocabulary."""
        with contextlib.suppress(FlowPrefillError):  # no template that works: who chats is told
            self.apply_chat_template([{"role": "user", "content": ""}])

    @cached_property
    def _chat_template(self) -> ChatTemplate | None:
        if self._chat_template_source is None:
            return None
        return ChatTemplate(self._chat_template_source, self._named_tokens)

    @cached_property
    def _content_encoder(self) -> _ContentEncoder:
        return _ContentEncoder(self._backend)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer that model.json names, by path or as `package:NAME`, or the model's own.

    Raises ModelLoadError (see resolve_model_path) or what Tokenizer.load raises.
    """
    if config.tokenizer is None:
        return Tokenizer.load(resolve_model_path(config.model))
    if config.tokenizer.startswith("package:"):
        return Tokenizer.load(resolve_model_path(config.tokenizer))
    # A directory with a tokenizer alone is no model: nothing else to look for in it.
    return Tokenizer.load(Path(config.tokenizer).expanduser())


class _ContentEncoder:
    """Encodes text in which escaped parts never become control tokens.

    Control tokens are all added tokens but runs of whitespace. They are found in raw text before
    anything else, so `escape` replaces every character that could begin one by a digraph, and
    normalisation, which comes later, puts the character back. In this copy of the tokenizer control
    tokens are found in raw text only, and the model's vocabulary lacks them (else a unigram model
    could still spell one). What surrounds an escaped part is split as if it were not escaped, so
    harmless text has the same ids as in the original.
    """

    _ESCAPE = "\ufdd0"  # a noncharacter; escaped itself where it occurs

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        control = {t.content for t in added.values() if t.content and not t.content.isspace()}
        # The escape is restored last: restored earlier, it could pair up with what follows it.
        escaped_chars = [*sorted({text[0] for text in control} - {self._ESCAPE}), self._ESCAPE]
        digraphs = {char: self._ESCAPE + chr(0xE000 + i) for i, char in enumerate(escaped_chars)}
        self._table = str.maketrans(digraphs)
        config = json.loads(backend.to_str())
        for token in config["added_tokens"]:
            token["normalized"] = False
        steps = [
            {"type": "Replace", "pattern": {"String": digraph}, "content": char}
            for char, digraph in digraphs.items()
        ]
        normalizer = config["normalizer"]
        config["normalizer"] = {
            "type": "Sequence",
            "normalizers": steps if normalizer is None else [*steps, normalizer],
        }
        # Unknown characters become the unknown token, which controls nothing.
        _hide_from_model(config["model"], control - {config["model"].get("unk_token")})
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(config))
        # Tokens that the model lacks were numbered anew, behind its vocabulary.
        self._original_ids = {
            self._backend.token_to_id(token.content): token_id for token_id, token in added.items()
        }

    def escape(self, value: Any) -> Any:
        """`value` with every string in it escaped: text, or a JSON value that holds text."""
        if isinstance(value, str):
            return value.translate(self._table)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape(item) for item in value]
        return value

    def encode(self, text: str) -> list[int]:
        ids = _encode(self._backend, text, add_special_tokens=False)
        return [self._original_ids.get(token_id, token_id) for token_id in ids]


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    # Unlike `encode`, a batch lets other threads run meanwhile: 0.3 s for the longest prompts.
    (encoding,) = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def _hide_from_model(model: dict[str, Any], texts: set[str]) -> None:
    """Rename tokens in a model of tokenizer.json so that no text can spell them."""
    nonce = secrets.token_hex(16)
    if isinstance(model["vocab"], dict):
        vocab = {nonce + text if text in texts else text: i for text, i in model["vocab"].items()}
        # Without holes, tokens that are numbered anew cannot take the id of another one.
        holes = set(range(max(vocab.values()))).difference(vocab.values())
        model["vocab"] = {**vocab, **{f"{nonce}{i}": i for i in holes}}
    else:  # unigram: [text, score] by id
        model["vocab"] = [
            [nonce + text if text in texts else text, score] for text, score in model["vocab"]
        ]
    if "merges" in model:
        model["merges"] = [
            pair for pair in model["merges"] if texts.isdisjoint((*pair, "".join(pair)))
        ]


def _token_bytes_table(backend: tokenizers.Tokenizer) -> list[bytes]:
    """Token id -> the bytes it stands for; empty for ids without a token."""
    vocab = backend.get_vocab(with_added_tokens=True)
    to_bytes = _text_to_bytes(backend)
    table = [b""] * (max(vocab.values()) + 1)
    for text, token_id in vocab.items():
        table[token_id] = to_bytes(text)
    for token_id, token in backend.get_added_tokens_decoder().items():
        table[token_id] = token.content.encode()
    return table


def _text_to_bytes(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How this model's decoder reads the text of a vocabulary entry."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if set(steps) == {"ByteLevel"}:
        return _byte_level_bytes
    # Strip takes away the space in front of a whole text; tokens here follow others.
    if "Metaspace" in steps and set(steps) <= {"Metaspace", "ByteFallback", "Fuse", "Strip"}:
        space_mark = steps["Metaspace"]["replacement"]
    elif "Replace" in steps and set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        space_mark = steps["Replace"]["pattern"].get("String")
    else:
        raise UnsupportedTokenizerError(
            f"decoder {' + '.join(map(str, steps))} is not known; known: ByteLevel, and Metaspace "
            "or Replace with or without ByteFallback"
        )
    has_bytes = "ByteFallback" in steps

    def sentencepiece_bytes(text: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(text) if has_bytes else None
        return bytes([int(byte[1], 16)]) if byte else text.replace(space_mark, " ").encode()

    return sentencepiece_bytes


def _byte_level_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in text)
    except KeyError:  # an entry outside the alphabet stands for itself
        return text.encode()


def _byte_level_alphabet() -> str:
    """The character that stands for each byte in byte-level BPE (GPT-2).

    Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up in turn.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(_byte_level_alphabet())}


def _check_text(field: str, text: object) -> None:
    """Raise InvalidParameterError unless `text` is a str that UTF-8 can hold."""
    if not isinstance(text, str):
        raise InvalidParameterError(field, text, "text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[error.start : error.end]
        raise InvalidParameterError(field, shown, "valid Unicode (no lone surrogates)") from error


def _check_messages(messages: object) -> None:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidParameterError("messages", messages, "a list of at least one message")
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidParameterError(field, message, "an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or not _ROLE.fullmatch(role):
            raise InvalidParameterError(f"{field}.role", role, "a word such as user")
        _check_text(f"{field}.content", message.get("content"))
