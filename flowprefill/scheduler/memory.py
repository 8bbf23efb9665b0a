"""KVMemory: who holds which KV blocks, and who loses them. Pure; knows no policy.

A prefill takes the blocks of its tokens at its start, less those found by its prefix; a decoding
sequence grows. Blocks come from the free ones, then from the cached ones, then from the holder with
the last claim behind that of the one that asks, parked or decoding.

Claims are in the order of urgency. Under a policy that gives late requests up these claim blocks
behind all others until they have their first token, for parked and hopeless they would keep blocks
from newcomers that can be on time. The one late longest keeps its place: its share of the device
would be spent on the same rows again and again. So a request changes its place at most when it
becomes late, when it is the one late longest, and at its first token; between these the order is
strict, and any one request fits alone: the holder with the first claim can always go on to its end,
and no two take blocks from each other in turn.

Whoever lost its blocks starts again when the pool has room for its whole need, prompt + max_tokens,
without taking from others: it is not evicted again and again for blocks that it frees itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from flowprefill.kv.block_pool import BlockPool
from flowprefill.scheduler.tracked import Tracked, Urgency

Claim = tuple[bool, Urgency]
"""Whether it stands behind all others; urgency."""

LOOKAHEAD_TOKENS = 64
"""Decoding sequences take room for so many tokens ahead while there is plenty."""


class KVMemory:
    """Blocks of live requests in one pool."""

    def __init__(self, pool: BlockPool, *, prefix_caching: bool) -> None:
        self._pool = pool
        self._prefix_caching = prefix_caching
        self._late_before_s = -math.inf
        self._late_longest: Tracked | None = None
        self.num_evictions = 0

    def put_late_last(self, now_s: float, late_longest: Tracked | None) -> None:
        """From now on requests past their deadlines claim blocks behind all others.

        late_longest: the exception, if any is late
        """
        self._late_before_s, self._late_longest = now_s, late_longest

    def claim(self, request: Tracked) -> Claim:
        """Its place in the strict total order of who keeps blocks, smallest first."""
        is_late = request.deadline_s < self._late_before_s
        return is_late and request is not self._late_longest, request.urgency

    def blocks_for(self, request: Tracked) -> int:
        """Blocks of its whole need."""
        return self._pool.blocks_for(request.num_total_tokens)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    def cached_blocks(self, request: Tracked) -> list[int]:
        """Blocks that hold the beginning of its input; its last token is always computed."""
        if not self._prefix_caching or not request.prefix_keys:
            return []
        max_blocks = (request.num_input_tokens - 1) // self._pool.block_size
        return self._pool.match(request.prefix_keys[:max_blocks])

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    def might_fit(self, request: Tracked) -> bool:
        """False if a waiting request cannot start without blocks of others, by a quick look."""
        return self._need(request) - len(request.prefix_keys) <= self._pool.num_free

    def start(self, request: Tracked, holders: Iterable[Sequence[Tracked]]) -> list[Tracked] | None:
        """Give a waiting request its blocks. Returns those that lost theirs, or None: no room.

        holders: groups that lose their blocks together: packed prefills, single sequences.
        """
        cached = self.cached_blocks(request)
        missing = self._missing(request, cached)
        victims: list[Tracked] = []
        if missing > 0:
            if request.num_evictions:
                return None
            found = self._victims(self.claim(request), missing, holders, kept=set(cached))
            if found is None:
                return None
            victims = found
            for victim in victims:
                self._evict(victim)
        self._pool.acquire(cached)
        num_new = self._pool.blocks_for(request.num_input_tokens) - len(cached)
        new = self._pool.allocate(num_new)
        assert new is not None, "started without room"
        request.block_ids = [*cached, *new]
        request.num_cached_tokens = len(cached) * self._pool.block_size
        return victims

    def grow(
        self, sequences: Sequence[Tracked], holders: Callable[[], Iterable[Sequence[Tracked]]]
    ) -> list[Tracked]:
        """Room for one more token of each decoding sequence; returns those that lost their blocks.

        The most urgent grow first. One that finds nothing to take is itself evicted.
        """
        evicted: list[Tracked] = []
        short = [s for s in sequences if self.num_steps(s) < 1]
        for sequence in sorted(short, key=lambda s: s.urgency):
            if not sequence.block_ids:  # evicted for a more urgent one
                continue
            while (new := self._pool.allocate(1)) is None:
                victims = self._victims(self.claim(sequence), 1, holders(), set()) or [sequence]
                for victim in victims:
                    self._evict(victim)
                evicted += victims
                if sequence in victims:
                    break
            else:
                sequence.block_ids += new
        # All at once, and before the first of them is at its end: steps then go on undisturbed.
        if any(self.num_steps(s) < LOOKAHEAD_TOKENS // 2 for s in sequences):
            self._look_ahead([s for s in sequences if s.block_ids])
        return evicted

    def num_steps(self, sequence: Tracked) -> int:
        """Decode steps for which a sequence has room."""
        capacity = len(sequence.block_ids) * self._pool.block_size
        return capacity - sequence.num_context_tokens

    def publish(self, request: Tracked, keys: Sequence[object]) -> None:
        """The full blocks named by `keys` are written: prompts that begin alike share them."""
        if self._prefix_caching and keys:
            self._pool.publish(request.block_ids[: len(keys)], keys)

    def free(self, block_ids: Sequence[int]) -> None:
        self._pool.free(block_ids)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless exactly these hold the used blocks."""
        self._pool.check_integrity(holders)

    def _missing(self, request: Tracked, cached: Sequence[int]) -> int:
        """Blocks that must be freed before it can start."""
        needed = self._need(request) - len(cached)
        return needed - self._pool.num_free_after_acquiring(cached)

    def _need(self, request: Tracked) -> int:
        """Blocks that it must find, its own and shared ones, to start."""
        whole = request.num_evictions > 0
        return self._pool.blocks_for(
            request.num_total_tokens if whole else request.num_input_tokens
        )

    def _victims(
        self,
        claim: Claim,
        missing: int,
        holders: Iterable[Sequence[Tracked]],
        kept: set[int],
    ) -> list[Tracked] | None:
        """The holders with the last claims behind `claim` whose blocks make up for `missing`, or
        None.

        A block that another one shares is not freed with its holder, nor one of `kept`, which the
        asking request will share.
        """
        below = [(min(map(self.claim, group)), group) for group in holders]
        below = sorted((x for x in below if x[0] > claim), key=lambda x: x[0])
        victims: list[Tracked] = []
        lost: dict[int, int] = {}
        while missing > 0:
            if not below:
                return None
            _, group = below.pop()
            for request in group:
                victims.append(request)
                for block_id in request.block_ids:
                    lost[block_id] = lost.get(block_id, 0) + 1
                    if lost[block_id] == self._pool.ref_count(block_id) and block_id not in kept:
                        missing -= 1
        return victims

    def _evict(self, request: Tracked) -> None:
        self._pool.free(request.block_ids)
        request.block_ids = []
        request.num_evictions += 1
        self.num_evictions += 1

    def _look_ahead(self, sequences: Sequence[Tracked]) -> None:
        """Take further blocks at once, so that not every few steps need a decision."""
        wanted = []
        for sequence in sequences:
            end = sequence.num_context_tokens + LOOKAHEAD_TOKENS
            tokens = min(end, sequence.num_total_tokens)
            wanted.append(max(0, self._pool.blocks_for(tokens) - len(sequence.block_ids)))
        if sum(wanted) > self._pool.num_free // 8:
            return
        for sequence, num_blocks in zip(sequences, wanted, strict=True):
            new = self._pool.allocate(num_blocks)
            assert new is not None
            sequence.block_ids += new
