"""Tokens -> text as it arrives: whole characters only, and never part of a stop string.

The joined text is a function of the tokens alone: it does not depend on how they are grouped into
responses, so a stream and a single answer are the same text.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from flowprefill.sampling_params import SamplingParams
from flowprefill.tokenizer import Tokenizer


@dataclass(frozen=True)
class StreamDelta:
    """What one token adds to the text."""

    text: str
    """May be empty: part of a character, or of what may become a stop string, is held back."""
    stopped: bool = False
    """A stop string was found in this or an earlier token: the text is complete."""
    stop_string: str | None = None
    """The stop string that was found."""


class TextStream:
    """The text of one answer.

    A stop string ends the text as soon as it is complete, the longest one where several end at the
    same character. It must end behind the text of the first min_tokens tokens (as in vLLM).
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._skipped = tokenizer.special_token_ids if sampling.skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # Longest first: where several end at the same character the longest is found first.
        stops = sorted(sampling.stop, key=len, reverse=True)
        self._matchers = [_StopMatcher(stop) for stop in stops]
        self._held = ""
        self._num_tokens = 0
        self._stop_string: str | None = None

    def push(self, token_id: int, is_stop_token: bool = False) -> StreamDelta:
        """Take the next token.

        is_stop_token: this token (EOS or one of stop_token_ids) ended the answer; it is no part of
        the text unless include_stop_str_in_output. Tokens after a stop string add nothing.
        """
        self._num_tokens += 1
        is_hidden = is_stop_token and not self._sampling.include_stop_str_in_output
        if is_hidden or token_id in self._skipped or self._stop_string is not None:
            return self._delta("")
        return self._delta(self._advance(self._utf8.decode(self._tokenizer.token_bytes(token_id))))

    def finish(self) -> str:
        """The answer is complete: what was held back. Bytes of a cut character become U+FFFD."""
        if self._stop_string is not None:
            return ""
        text = self._advance(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _delta(self, text: str) -> StreamDelta:
        return StreamDelta(text, self._stop_string is not None, self._stop_string)

    def _advance(self, new_text: str) -> str:
        """Take new characters. Returns what can be emitted."""
        text = self._held + new_text
        for position, char in enumerate(new_text, start=len(self._held) + 1):
            stop = self._match(char)
            if stop is not None:
                self._stop_string, self._held = stop, ""
                keeps_stop = self._sampling.include_stop_str_in_output
                return text[: position if keeps_stop else position - len(stop)]
        num_held = max((m.num_matched for m in self._matchers), default=0)
        if self._sampling.include_stop_str_in_output:
            num_held = 0  # it is part of the text whether it becomes a stop string or not
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _match(self, char: str) -> str | None:
        """Advance all matchers by one character. Returns the stop string that ends with it."""
        found = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
        return found[0] if found and self._num_tokens > self._sampling.min_tokens else None


class _StopMatcher:
    """Finds one string in a stream of characters (Knuth, Morris, Pratt 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest end of the text so far that is a proper beginning of the string."""
        # _fallback[n]: the longest proper beginning of stop[:n] that is also an end of it.
        self._fallback = [0, 0]
        for n in range(1, len(stop)):
            self._fallback.append(self._next(self._fallback[n], stop[n]))

    def advance(self, char: str) -> bool:
        """Returns whether the string ends with this character."""
        num_matched = self._next(self.num_matched, char)
        is_complete = num_matched == len(self.stop)
        self.num_matched = self._fallback[num_matched] if is_complete else num_matched
        return is_complete

    def _next(self, num_matched: int, char: str) -> int:
        while num_matched and self.stop[num_matched] != char:
            num_matched = self._fallback[num_matched]
        return num_matched + (self.stop[num_matched] == char)
