"""One request of a trace, whatever file it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flowprefill.errors import FlowPrefillError

PREFIX_BLOCK_TOKENS = 512
"""Prompt tokens that one prefix hash stands for in our own trace files and in Mooncake's."""


class TraceError(FlowPrefillError):
    """A trace that cannot be read or made into what is asked; the message says where or why."""

    code = "INVALID_ARG"


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    arrival_s: float
    """Seconds from the start of the trace."""
    type: str
    """The service or kind of request, as the trace names it."""
    input_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `block_tokens`, the last one partial; two prompts with the
    same id at the same place are equal up to the end of that block. Empty: nothing is known."""
    block_tokens: int = PREFIX_BLOCK_TOKENS
    """Prompt tokens that one prefix hash stands for."""

    def check(self) -> None:
        """Raise ValueError naming what no request can have."""
        if not 0 <= self.arrival_s < math.inf:
            raise ValueError(f"arrival_s={self.arrival_s}: must be finite and >= 0")
        if self.input_tokens <= 0 or self.output_tokens <= 0:
            raise ValueError(f"tokens={self.input_tokens},{self.output_tokens}: must be > 0")
        num_blocks = -(-self.input_tokens // self.block_tokens)
        if self.prefix_hashes and len(self.prefix_hashes) != num_blocks:
            raise ValueError(f"{len(self.prefix_hashes)} prefix hashes for {num_blocks} blocks")

    def hashes_of_blocks(self, block_tokens: int) -> tuple[int, ...]:
        """The prefix hashes that blocks of `block_tokens` would have, the last one partial.

        A new block takes the name of the old block in which its end lies, so equal ids still mean
        equal beginnings; what is shared up to the middle of a block of either size is not seen.
        """
        old_tokens = self.block_tokens
        if block_tokens == old_tokens or not self.prefix_hashes:
            return self.prefix_hashes
        last = len(self.prefix_hashes) - 1
        # So many new blocks may end in one old one, or behind the last; each needs its own name.
        names_per_hash = -(-old_tokens // block_tokens) + 1
        ends = range(block_tokens, self.input_tokens + block_tokens, block_tokens)
        return tuple(
            self.prefix_hashes[min(last, (end - 1) // old_tokens)] * names_per_hash
            + block % names_per_hash
            for block, end in enumerate(ends)
        )
