"""The forms in which a prompt may come: text, token ids, or chat messages. Pure.

`text_input` holds it; the request parameter `prompt_format` says how it is to be read. Ids and
messages are JSON. The content of messages never becomes control tokens; text may spell them.
"""

from __future__ import annotations

import json
from typing import Any

from flowprefill.errors import InvalidParameterError
from flowprefill.tokenizer import Tokenizer

PROMPT_FORMAT = "prompt_format"
TEXT = "text"
TOKEN_IDS = "token_ids"
MESSAGES = "messages"
JSON_GROWTH = 6
"""JSON may write one byte of text as 6."""


def prompt_format(parameters: Any) -> str:
    """The format that a request names. Raises InvalidParameterError for an unknown one."""
    value = parameters.get(PROMPT_FORMAT, TEXT)
    if value not in (TEXT, TOKEN_IDS, MESSAGES):
        raise InvalidParameterError(PROMPT_FORMAT, value, f"{TEXT}, {TOKEN_IDS} or {MESSAGES}")
    return str(value)


def read_prompt(text: str, form: str, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Token ids of a prompt, at least one. Raises FlowPrefillError naming text_input or a message.

    vocab_size: the model's, which bounds token ids
    """
    if form == TOKEN_IDS:
        token_ids = _token_ids(_parse(text, "a JSON list of token ids"), vocab_size)
    elif form == MESSAGES:
        token_ids = tokenizer.apply_chat_template(_parse(text, "a JSON list of messages"))
    else:
        token_ids = tokenizer.encode(text)
    if not token_ids:
        raise InvalidParameterError("text_input", text, "a text of at least one token")
    return token_ids


def _parse(text: str, limit: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidParameterError("text_input", text, limit) from None


def _token_ids(value: Any, vocab_size: int) -> list[int]:
    limit = f"a token id, an integer in [0, {vocab_size - 1}]"
    if not isinstance(value, list):
        raise InvalidParameterError("text_input", value, "a JSON list of token ids")
    for index, token_id in enumerate(value):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidParameterError(f"text_input[{index}]", token_id, limit)
    return value
