"""Whether an answer depends on who shares the device, measured on the engine in this process."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from flowprefill.bench.bars import Bar
from flowprefill.bench.scenarios.base import Scenario
from flowprefill.bench.scenarios.rig import Rig
from flowprefill.bench.session import Answer, Session
from flowprefill.config import EngineConfig
from flowprefill.request import SLO

_NUM_PROMPTS = 20
_PROMPT_TOKENS = (8, 200)
_ANSWER_TOKENS = 16
_NUM_SOLO = 5
"""Runs of them alone."""
_NUM_LONG = 45
_CHUNKS = "chunk:64"
_PATIENT = SLO(ttft_s=3600.0, tbt_s=60.0)
_Answers = list[list[int]]


def shared_batch(rig: Rig) -> list[Bar]:
    """Greedy answers to 20 prompts alone, five times, and beside 45 unrelated prefills of 64 C.

    Where the engine found its arithmetic to depend on the batch, the rates are only reported.
    """
    draw = random.Random(rig.seed)
    long_tokens = rig.num_tokens(64)
    with _session(rig, rig.config) as session:
        lengths = [draw.randint(*_PROMPT_TOKENS) for _ in range(_NUM_PROMPTS)]
        prompts = [session.random_prompt(length) for length in lengths]
        limit = 0.0 if session.engine.info.bit_invariant else None
        solo = [_alone(session, prompts) for _ in range(_NUM_SOLO)]
        cached = _together(session, prompts, long_tokens)
    config = dataclasses.replace(rig.config, enable_prefix_caching=False)
    with _session(rig, config) as session:
        shared = _together(session, prompts, long_tokens)
    with _session(rig, dataclasses.replace(config, granularity=_CHUNKS)) as session:
        chunked = _together(session, prompts, long_tokens)
    others = {
        "from one run alone to the next": [answers for run in solo[1:] for answers in run],
        "beside 45 prefills": shared,
        "beside them, prompts seen before": cached,
        f"beside them, {_CHUNKS}": chunked,
    }
    return [
        Bar(f"answers that differ {what}", _share_differing(solo[0], answers), limit, "of all")
        for what, answers in others.items()
    ]


def _session(rig: Rig, config: EngineConfig) -> Session:
    return Session(config, rig.seed, lambda stage, fraction: None)


def _alone(session: Session, prompts: Sequence[list[int]]) -> _Answers:
    answers = []
    for prompt in prompts:
        answer = session.submit(prompt, _PATIENT, _ANSWER_TOKENS)
        answers.append(session.wait_end(answer).token_ids)
    return answers


def _together(session: Session, prompts: Sequence[list[int]], long_tokens: int) -> _Answers:
    """All at once, the long prefills before, between and behind the prompts."""
    longs: list[Answer] = []
    sent: list[Answer] = []
    for number in range(_NUM_LONG):
        longs.append(session.submit(session.random_prompt(long_tokens), _PATIENT))
        if number % 2 and len(sent) < len(prompts):
            sent.append(session.submit(prompts[len(sent)], _PATIENT, _ANSWER_TOKENS))
    for answer in longs:
        session.wait_end(answer)
    return [session.wait_end(answer).token_ids for answer in sent]


def _share_differing(expected: _Answers, answers: _Answers) -> float:
    """answers: of the same prompts, any number of times over."""
    pairs = zip(expected * (len(answers) // len(expected)), answers, strict=True)
    return sum(one != other for one, other in pairs) / max(1, len(answers))


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("shared-batch", 26, "vllm-project/vllm#5898", shared_batch),
)
