"""vLLM, for worker.py: its offline LLM class, one request at a time.

options: arguments of LLM, for example {"max_num_batched_tokens": 2048}
"""

from __future__ import annotations

import importlib
import os
import time
from typing import Any


class Engine:
    """Greedy, without prefix caching; tokens are never turned into text."""

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        cpus = sorted(os.sched_getaffinity(0))[: settings["num_threads"]]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cpus)))
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        self._vllm = vllm = importlib.import_module("vllm")
        self.version = f"vllm {vllm.__version__}"
        arguments = {
            "dtype": settings["dtype"],
            "max_model_len": settings["max_model_len"],
            "max_num_batched_tokens": 512,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": False,
            "max_num_seqs": 16,
            "disable_log_stats": True,
            "skip_tokenizer_init": True,
            **settings["options"],
        }
        self._llm = vllm.LLM(model=settings["model"], **arguments)

    def prefill(self, token_ids: list[int]) -> None:
        self._generate_s(token_ids, 1)

    def decode_s(self, token_ids: list[int], num_tokens: int) -> float:
        first_s = self._generate_s(token_ids, 1)
        return self._generate_s(token_ids, num_tokens + 1) - first_s

    def _generate_s(self, token_ids: list[int], num_tokens: int) -> float:
        params = self._vllm.SamplingParams(
            max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        start_s = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
        return time.perf_counter() - start_s


def load(settings: dict[str, Any]) -> Engine:
    return Engine(settings)
