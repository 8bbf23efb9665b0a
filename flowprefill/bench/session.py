"""An engine inside the benchmark's process, and the answers that it gives; no server."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from flowprefill.bench.report import BenchmarkError
from flowprefill.config import EngineConfig
from flowprefill.engine import Engine, LoadModel
from flowprefill.engine_model import load_for_engine
from flowprefill.request import SLO, FinishReason, PrefillTiming, Request, TokenOutput
from flowprefill.sampling_params import SamplingParams

_WAIT_S = 600.0


@dataclass
class Answer:
    """What came back for one request, and when."""

    req_id: int
    arrival_s: float
    token_ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """When each token was on the host."""
    prefill: PrefillTiming | None = None
    """With its first token."""
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; behind Session.wait_token."""
        return self.token_s[0] - self.arrival_s

    @property
    def blocking_s(self) -> float | None:
        """See PrefillTiming."""
        return self.prefill.blocking_s if self.prefill else None


class Session:
    """Sends greedy requests to an engine of its own; a context manager that closes it."""

    def __init__(
        self,
        config: EngineConfig,
        seed: int,
        on_progress: Callable[[str, float], None],
        load: LoadModel = load_for_engine,
    ) -> None:
        """Load the model; on_progress(stage, fraction) meanwhile. load: see Engine"""
        self._rng = random.Random(seed)
        self._req_ids = itertools.count(1)
        self._answers: dict[int, Answer] = {}
        self._changed = threading.Condition()
        self.engine = Engine(config, self._on_output, on_progress, load)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.engine.close()

    def random_prompt(self, num_tokens: int) -> list[int]:
        """Token ids that no other prompt begins with."""
        return [self._rng.randrange(self.engine.info.vocab_size) for _ in range(num_tokens)]

    def submit(self, prompt: Sequence[int], slo: SLO, max_tokens: int = 1) -> Answer:
        """Send a prompt of token ids; its answer has exactly max_tokens tokens."""
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        req_id, arrival_s = next(self._req_ids), time.monotonic()
        answer = self._answers[req_id] = Answer(req_id, arrival_s)
        self.engine.submit(Request(req_id, list(prompt), sampling, slo, arrival_s))
        return answer

    def wait_token(self, answer: Answer) -> Answer:
        """Wait for its first token."""
        return self._wait(answer, lambda: bool(answer.token_s))

    def wait_end(self, answer: Answer) -> Answer:
        """Wait for its last token."""
        return self._wait(answer, lambda: answer.finish_reason is not None)

    def has_ended_by(self, answer: Answer, time_s: float) -> bool:
        """Wait for its last token, but not beyond that monotonic time."""
        return self._wait_for(answer, lambda: answer.finish_reason is not None, time_s)

    def _wait(self, answer: Answer, is_there: Callable[[], bool]) -> Answer:
        """Raises BenchmarkError if the engine fails the request or is silent too long."""
        if not self._wait_for(answer, is_there, time.monotonic() + _WAIT_S):
            raise BenchmarkError(f"no answer within {_WAIT_S:.0f} s")
        return answer

    def _wait_for(self, answer: Answer, is_there: Callable[[], bool], until_s: float) -> bool:
        """Whether it is there in time. Raises BenchmarkError if the engine fails the request."""
        timeout_s = max(0.0, until_s - time.monotonic())
        with self._changed:
            found = self._changed.wait_for(lambda: is_there() or answer.error, timeout_s)
        if answer.error:
            raise BenchmarkError(f"the engine failed a request: {answer.error}")
        return bool(found)

    def _on_output(self, output: TokenOutput) -> None:
        """Called on the engine's threads."""
        with self._changed:
            answer = self._answers[output.req_id]
            if output.token_id is not None:
                answer.token_ids.append(output.token_id)
                answer.token_s.append(output.token_s)
            answer.prefill = answer.prefill or output.prefill
            answer.finish_reason = output.finish_reason
            if output.finish_reason is FinishReason.ERROR:
                answer.error = output.error_message or "no reason given"
            self._changed.notify_all()
