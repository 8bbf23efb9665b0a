"""OpenVINO GenAI, for worker.py: LLMPipeline on a folder that optimum-cli has exported."""

from __future__ import annotations

import importlib
from typing import Any

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


class Engine:
    """One pipeline on the CPU; greedy, with exactly as many tokens as asked for."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._numpy = importlib.import_module("numpy")
        self._openvino = importlib.import_module("openvino")
        self._genai = importlib.import_module("openvino_genai")
        self.version = f"openvino-genai {self._genai.__version__}"
        properties = {
            "INFERENCE_NUM_THREADS": settings["num_threads"],
            "INFERENCE_PRECISION_HINT": _PRECISIONS[settings["dtype"]],
            **settings["options"],
        }
        self._pipeline = self._genai.LLMPipeline(settings["model"], "CPU", **properties)

    def prefill(self, token_ids: list[int]) -> None:
        self._generate(token_ids, 1)

    def decode_s(self, token_ids: list[int], num_tokens: int) -> float:
        result = self._generate(token_ids, num_tokens + 1)
        return float(result.perf_metrics.get_tpot().mean) / 1000 * num_tokens

    def _generate(self, token_ids: list[int], num_tokens: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.do_sample = False
        config.ignore_eos = True
        config.apply_chat_template = False
        ids = self._numpy.array([token_ids], dtype="int64")
        tensor = self._openvino.Tensor
        inputs = self._genai.TokenizedInputs(tensor(ids), tensor(self._numpy.ones_like(ids)))
        return self._pipeline.generate(inputs, config)


def load(settings: dict[str, Any]) -> Engine:
    return Engine(settings)
