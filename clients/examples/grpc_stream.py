"""Stream an answer over gRPC with tritonclient alone, as for any model on tritonserver.

python clients/examples/grpc_stream.py --prompt "The capital of France is"
"""

from __future__ import annotations

import argparse
import json
import queue
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput


def make_input(name: str, datatype: str, value: object) -> InferInput:
    tensor = InferInput(name, [1], datatype)
    dtype = {"BYTES": np.object_, "BOOL": np.bool_, "FP32": np.float32}[datatype]
    tensor.set_data_from_numpy(np.array([value], dtype=dtype))
    return tensor


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream an answer over gRPC.")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()

    inputs = [
        make_input("text_input", "BYTES", args.prompt.encode()),
        make_input("stream", "BOOL", True),
        make_input("ttft_slo_ms", "FP32", 400.0),
        make_input("sampling_parameters", "BYTES", json.dumps({"max_tokens": 32}).encode()),
    ]
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with InferenceServerClient(args.url) as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        client.async_stream_infer(args.model, inputs)
        final = False
        while not final:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise SystemExit(str(error))
            print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
            final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()
    print()


if __name__ == "__main__":
    main()
