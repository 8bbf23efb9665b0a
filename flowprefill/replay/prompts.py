"""Prompts of a replay: texts of exact token counts that share what the trace says they share.

A server is sent text, not token ids. So prompts are made of words that the model's tokenizer turns
into one token each, whatever is before them; every prompt is encoded once to see that it holds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable

from flowprefill.replay.errors import ReplayError
from flowprefill.replay.plan import PlannedRequest

_WORDS = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or "
    "had an they which you were all her she there would their we him been has when who will more "
    "no if out so said what up its about into than them can only other new some could time these "
    "two may then do first any my now such like our over man me even most made after also did many "
    "before must through back years where much your way well down should because each just those "
    "people how too little state good very make world still own see men work long get here between "
    "both life being under never day same another know while last might us great old year off come"
)
COMMON_WORDS = tuple(_WORDS.split())
"""Nearly every tokenizer has each of them, with a space before it, as one token."""

_MIN_WORDS = 50
"""With fewer, prompts would be alike by chance."""


class PromptMaker:
    """Makes the prompts of a plan: the same ones for the same seed."""

    def __init__(self, encode: Callable[[str], list[int]], seed: int) -> None:
        """encode: the server's tokenizer, with the tokens that it puts in front of a prompt.

        Raises ReplayError for a tokenizer to which too few common words are one token.
        """
        self._encode = encode
        self._seed = seed
        starts = {word: ids for word in COMMON_WORDS if (ids := encode(word))}
        heads: Counter[tuple[int, ...]] = Counter(tuple(ids[:-1]) for ids in starts.values())
        ((head, _),) = heads.most_common(1) or [((), 0)]
        self._head = list(head)  # BOS, or nothing
        self._first_ids = {w: ids[-1] for w, ids in starts.items() if ids[:-1] == self._head}
        self._later_ids = self._ids_behind(next(iter(self._first_ids), ""))
        self._words = [word for word in self._first_ids if word in self._later_ids]
        if len(self._words) < _MIN_WORDS:
            raise ReplayError(
                f"{len(self._words)} of {len(COMMON_WORDS)} common English words are one token to "
                f"this tokenizer; prompts of exact lengths need {_MIN_WORDS}"
            )

    def _ids_behind(self, first: str) -> dict[str, int]:
        """Ids of words that add one token to a text that ends in the word `first`."""
        before = self._encode(first)
        ids = {word: self._encode(f"{first} {word}") for word in COMMON_WORDS}
        return {word: found[-1] for word, found in ids.items() if found and found[:-1] == before}

    def make(self, planned: PlannedRequest) -> str:
        """The text of one prompt.

        Blocks of equal prefix hashes at the same place are equal, token by token. Raises
        ReplayError for a prompt that has no room for a word, or that the tokenizer joins.
        """
        num_tokens, num_special = planned.input_tokens, len(self._head)
        if num_tokens <= num_special:
            raise ReplayError(
                f"request {planned.req_id}: no prompt has {num_tokens} tokens, as this tokenizer "
                f"puts {num_special} in front"
            )
        # Special tokens stand where the first block's first words would, so that later blocks
        # begin where the trace's do.
        words = self._block_words(planned)[num_special:num_tokens]
        text = " ".join(words)
        expected = [*self._head, self._first_ids[words[0]]]
        expected += [self._later_ids[word] for word in words[1:]]
        if self._encode(text) != expected:
            raise ReplayError(
                f"request {planned.req_id}: this tokenizer does not take words one by one"
            )
        return text

    def _block_words(self, planned: PlannedRequest) -> list[str]:
        """A word for each token of all blocks, or of the prompt if it has none."""
        if not planned.prefix_hashes:
            return self._random_words(f"request {planned.req_id}", planned.input_tokens)
        blocks: Iterable[list[str]] = (
            self._random_words(f"block {name}", planned.block_tokens)
            for name in planned.prefix_hashes
        )
        return [word for block in blocks for word in block]

    def _random_words(self, what: str, number: int) -> list[str]:
        return random.Random(f"{self._seed} {what}").choices(self._words, k=number)
