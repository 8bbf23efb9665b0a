"""What runs in a peer's interpreter: python -I worker.py SETTINGS. Imports nothing of ours.

Loads the module of one engine beside this file, then answers one JSON request a line on standard
input with one JSON line on standard output: {"num_tokens": n, "seed": s} with the seconds of a
prefill, and with "decode": k too with the seconds of k tokens behind the first. All that the engine
itself prints goes to standard error.

An engine module has load(settings), which returns an object with `version`, prefill(token_ids),
which returns when the first token is known, and decode_s(token_ids, num_tokens).
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Serve requests until standard input ends."""
    os.setpgrp()  # so that all that the engine starts can be stopped together
    settings = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(values: dict[str, Any]) -> None:
        answers.write(json.dumps(values) + "\n")
        answers.flush()

    engine = load_module(settings["worker"]).load(settings)
    answer({"version": engine.version})
    for line in sys.stdin:
        answer({"seconds": measure_s(engine, json.loads(line), settings["vocab_size"])})


def load_module(name: str) -> Any:
    """The engine module; not by import, which would find the engine of that name."""
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"peer_{name}", path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure_s(engine: Any, request: dict[str, int], vocab_size: int) -> float:
    """Run what is asked for; the prompt is that which the benchmark draws for itself."""
    draw = random.Random(request["seed"])
    token_ids = draw.choices(range(vocab_size), k=request["num_tokens"])
    if "decode" in request:
        return float(engine.decode_s(token_ids, request["decode"]))
    start_s = time.perf_counter()
    engine.prefill(token_ids)
    return time.perf_counter() - start_s


if __name__ == "__main__":  # engines start processes that import this file again
    main()
