"""Replies: the JSON of an answer, whole or in chunks, in the form of either endpoint."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from flowprefill_client import Completion, Delta, TokenLogprob


class Reply(ABC):
    """One answer of an endpoint; `n` choices for each prompt, side by side."""

    whole_object: str
    chunk_object: str

    def __init__(self, reply_id: str, model: str, num_choices: int) -> None:
        self.reply_id = reply_id
        self._model = model
        self._created = int(time.time())
        self._text_lengths = [0] * num_choices
        """Of the tokens so far, for text offsets."""
        self._is_begun = [False] * num_choices

    def whole(self, answers: Sequence[Completion], n: int) -> dict[str, Any]:
        """The answer as one document."""
        choices = [
            {
                "index": index,
                "finish_reason": answer.finish_reason,
                "logprobs": self._logprobs(index, answer.logprobs),
                **self._content(answer.text),
            }
            for index, answer in enumerate(answers)
        ]
        return self._document(self.whole_object, choices) | {"usage": usage(answers, n)}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """New text of one choice; None if it says nothing, as part of a character."""
        if not (delta.text or delta.logprobs or delta.finish_reason):
            return None
        choice = {
            "index": index,
            "finish_reason": delta.finish_reason,
            "logprobs": self._logprobs(index, delta.logprobs),
            **self._new_content(delta.text, is_first=not self._is_begun[index]),
        }
        self._is_begun[index] = True
        return self._document(self.chunk_object, [choice])

    def usage_chunk(self, answers: Sequence[Completion], n: int) -> dict[str, Any]:
        """What follows the last text, for clients that asked for it."""
        return self._document(self.chunk_object, []) | {"usage": usage(answers, n)}

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.reply_id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    @abstractmethod
    def _content(self, text: str) -> dict[str, Any]:
        """The text of a whole choice."""

    @abstractmethod
    def _new_content(self, text: str, is_first: bool) -> dict[str, Any]:
        """New text of a choice."""

    @abstractmethod
    def _logprobs(
        self, index: int, tokens: Sequence[Sequence[TokenLogprob]]
    ) -> dict[str, Any] | None:
        """Of new tokens of a choice: for each itself, then the most likely ones."""


class CompletionReply(Reply):
    """/v1/completions."""

    whole_object = chunk_object = "text_completion"

    def _content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _new_content(self, text: str, is_first: bool) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(
        self, index: int, tokens: Sequence[Sequence[TokenLogprob]]
    ) -> dict[str, Any] | None:
        if not tokens:
            return None
        offsets = []
        for token in tokens:
            offsets.append(self._text_lengths[index])
            self._text_lengths[index] += len(token[0].text)
        return {
            "tokens": [token[0].text for token in tokens],
            "token_logprobs": [token[0].logprob for token in tokens],
            # Of tokens that look alike, as parts of characters do, the chosen or likelier one.
            "top_logprobs": [{t.text: t.logprob for t in reversed(token)} for token in tokens],
            "text_offset": offsets,
        }


class ChatReply(Reply):
    """/v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, reply_id: str, model: str, num_choices: int, num_top: int) -> None:
        """num_top: most likely tokens to name for each token."""
        super().__init__(reply_id, model, num_choices)
        self._num_top = num_top

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _new_content(self, text: str, is_first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text}}

    def _logprobs(
        self, index: int, tokens: Sequence[Sequence[TokenLogprob]]
    ) -> dict[str, Any] | None:
        if not tokens:
            return None
        return {
            "content": [
                {**_token(token[0]), "top_logprobs": [_token(top) for top in self._top(token)]}
                for token in tokens
            ]
        }

    def _top(self, token: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        """Unlike the model's list, OpenAI's holds the chosen token only if its rank says so."""
        return sorted(token, key=lambda top: top.rank)[: self._num_top]


def usage(answers: Sequence[Completion], n: int) -> dict[str, Any]:
    """Tokens of all choices; those of a prompt count once for its `n` choices."""
    prompts = answers[::n]
    num_prompt = sum(answer.num_input_tokens or 0 for answer in prompts)
    num_completion = sum(answer.num_output_tokens for answer in answers)
    num_cached = sum((answer.timing or {}).get("num_cached_tokens") or 0 for answer in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _token(token: TokenLogprob) -> dict[str, Any]:
    # A part of a character has no text of its own, and its bytes are not told.
    is_whole = "\ufffd" not in token.text
    return {
        "token": token.text,
        "logprob": token.logprob,
        "bytes": list(token.text.encode()) if is_whole else None,
    }
