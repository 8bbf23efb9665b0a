"""One answer from an in-process engine: `flowprefill generate`. No server."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

from flowprefill.config import EngineConfig
from flowprefill.engine import Engine
from flowprefill.errors import FlowPrefillError
from flowprefill.request import FinishReason, Request, TokenOutput
from flowprefill.sampling_params import SamplingParams
from flowprefill.text_stream import TextStream
from flowprefill.tokenizer import load_tokenizer


def generate(
    config: EngineConfig,
    prompt: str,
    sampling: SamplingParams,
    is_chat: bool = False,
    on_progress: Callable[[str, float], None] | None = None,
) -> Iterator[str]:
    """Load the model and yield the text as it comes.

    is_chat: the prompt is a user's message, put into the model's chat template.
    on_progress(stage, fraction): while the model loads.
    """
    tokenizer = load_tokenizer(config)
    if is_chat:
        prompt_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    else:
        prompt_ids = tokenizer.encode(prompt)
    outputs: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()
    engine = Engine(config, outputs.put, on_progress)
    try:
        engine.submit(Request(1, prompt_ids, sampling, config.slo(), time.monotonic()))
        yield from _texts(outputs, TextStream(tokenizer, sampling))
    finally:
        engine.close()


def _texts(outputs: queue.SimpleQueue[TokenOutput], stream: TextStream) -> Iterator[str]:
    while True:
        output = outputs.get()
        if output.finish_reason is FinishReason.ERROR:
            raise FlowPrefillError(output.error_message or "the engine gave no reason")
        if output.token_id is not None:
            delta = stream.push(output.token_id, output.finish_reason is FinishReason.STOP)
            yield delta.text
            if delta.stopped:
                return
        if output.finish_reason is not None:
            yield stream.finish()
            return
