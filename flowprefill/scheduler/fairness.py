"""FairShare: tenants with work waiting get equal numbers of tokens. Off unless model.json says so.

Each tenant has a virtual counter of tokens served, as in VTC (Sheng et al., Fairness in Serving
Large Language Models, OSDI 2024). A tenant that comes back from idling starts at least at the
smallest counter of those with work, or at that of the last one that had some, so it banks no
credit. The policy chooses among the requests of the tenants that are at most QUANTUM_TOKENS ahead
of the one served least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flowprefill.scheduler.tracked import Tracked

QUANTUM_TOKENS = 2048
"""How far tenants may be apart before deadlines no longer count between them."""
_MAX_IDLE = 64
"""Counters of idle tenants that are kept before they are looked through."""


class FairShare:
    """Virtual token counters by tenant."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_live: Counter[str] = Counter()
        self._last_to_leave = 0.0  # its counter

    def arrive(self, request: Tracked) -> None:
        tenant = request.tenant
        if not self._num_live[tenant]:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._start())
        self._num_live[tenant] += 1

    def _start(self) -> float:
        """Where a tenant that has banked nothing starts."""
        live = (self._served[tenant] for tenant in self._num_live)
        return min(live, default=self._last_to_leave)

    def leave(self, request: Tracked) -> None:
        self._num_live[request.tenant] -= 1
        if not self._num_live[request.tenant]:
            del self._num_live[request.tenant]
            self._last_to_leave = self._served[request.tenant]
        if len(self._served) > 2 * len(self._num_live) + _MAX_IDLE:
            self._forget_idle()

    def _forget_idle(self) -> None:
        """Idle tenants that would start where others do."""
        start = self._start()
        self._served = {t: n for t, n in self._served.items() if t in self._num_live or n > start}

    def charge(self, request: Tracked, num_tokens: float) -> None:
        self._served[request.tenant] += num_tokens
        request.num_charged_tokens += num_tokens

    def charge_prefill(self, request: Tracked) -> None:
        """Charge what its prefill has computed by now; nothing twice, also after an eviction."""
        if request.prefill_s > 0:
            done = 1 - min(request.remaining_s / request.prefill_s, 1.0)
            tokens = done * (request.num_input_tokens - request.num_cached_tokens)
            if tokens > request.num_charged_tokens:
                self.charge(request, tokens - request.num_charged_tokens)

    def served(self) -> dict[str, float]:
        """Tokens by tenant with live requests; only differences mean something."""
        return {tenant: self._served[tenant] for tenant in self._num_live}

    def within_share(self, candidates: Sequence[Tracked]) -> Sequence[Tracked]:
        """The candidates of tenants that are not ahead of the others; not empty."""
        live = [self._served[tenant] for tenant in self._num_live]
        if max(live) <= QUANTUM_TOKENS + min(live):  # most of the time: spares a look at them all
            return candidates
        limit = QUANTUM_TOKENS + min(self._served[t] for t in {c.tenant for c in candidates})
        ahead = {tenant for tenant in self._num_live if self._served[tenant] > limit}
        return [c for c in candidates if c.tenant not in ahead] if ahead else candidates
