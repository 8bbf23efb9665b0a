"""How fast the machine is at the moment, and replays in the seconds of that machine.

Other tenants change a shared machine's speed by the minute, and near saturation 1% of speed is 3%
of mean TTFT: of two replays one might lose to the weather. So arrivals and objectives of a replay
are stretched by how much slower than its profile the device is just before, whatever is measured,
and a replay in which that changed, or that is void, is repeated. Nothing else runs meanwhile.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from flowprefill.loading import LoadedModel
    from flowprefill.predictor.fitted import FittedPredictor

T = TypeVar("T")
Stopped = Callable[[], AbstractContextManager[None]]

STEADY = 0.1
"""Largest change of speed during a replay that counts."""
MAX_TRIES = 3
_STRETCH_S = 1.0
"""How long products are repeated to find the speed; shorter ones vary more than the machine."""
_ROUNDS = 5
PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Paced(Generic[T]):
    """What a replay gave, and the speed it had."""

    value: T
    slowdown: float
    """Seconds of the machine over those of its profile."""
    drift: float
    """By which share that was another behind the replay."""


class Pace:
    """The machine's speed, by a piece of work that is always the same."""

    def __init__(self, work: Callable[[], float], usual_s: float) -> None:
        """work: does it and returns its seconds; usual_s: what it takes at the profile's speed."""
        self._work = work
        self._usual_s = usual_s

    def slowdown(self) -> float:
        """Seconds that work takes now over those that the profile stands for."""
        return self._work() / self._usual_s

    def replay(
        self,
        replay: Callable[[float], T],
        stopped: Stopped = nullcontext,
        is_void: Callable[[T], bool] = lambda value: False,
    ) -> Paced[T]:
        """Call replay(slowdown) until the speed was steady meanwhile, MAX_TRIES times at most; the
        result of the steadiest one that is not void, if there is such a one.

        stopped: gives a context in which what is measured does nothing at all, as idle threads may
            spin and would be taken for a slow machine
        is_void: whether a result means nothing, however steady it was
        """
        tries: list[Paced[T]] = []
        for _ in range(MAX_TRIES):
            with stopped():
                before = self.slowdown()
            value = replay(before)
            with stopped():
                after = self.slowdown()
            tries.append(Paced(value, before, abs(after / before - 1)))
            if tries[-1].drift <= STEADY and not is_void(value):
                break
        return min(tries, key=lambda paced: (is_void(paced.value), paced.drift))


def measure_pace(model: LoadedModel, predictor: FittedPredictor, prefill_s: float) -> Pace:
    """Compare products with prefills of PROMPT_TOKENS, which the profile gives prefill_s.

    model: nobody else uses its KV cache
    """
    from flowprefill.bench.gemm_ceiling import layer_product
    from flowprefill.bench.prefill_modes import Prefiller

    product = layer_product(model.spec, model.dtype, model.device.torch_device)
    prefiller = Prefiller(model, predictor)
    prompt = random.Random(0).choices(range(model.spec.vocab_size), k=PROMPT_TOKENS)

    def work() -> float:
        model.device.use_in_this_thread()
        return mean_seconds(product, _STRETCH_S)

    rounds = [work() * prefill_s / prefiller.seconds("sliced", prompt) for _ in range(_ROUNDS)]
    return Pace(work, statistics.median(rounds))


def mean_seconds(run: Callable[[], object], stretch_s: float) -> float:
    """Of one call, of as many as take that long together."""
    start_s = time.perf_counter()
    num_calls = 0
    while (seconds := time.perf_counter() - start_s) < stretch_s or not num_calls:
        run()
        num_calls += 1
    return seconds / num_calls
