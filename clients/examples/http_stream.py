"""Stream an answer over HTTP with nothing but the standard library.

    python clients/examples/http_stream.py --prompt "The capital of France is"

The reply is a series of server-sent events, one JSON object each.
"""

from __future__ import annotations

import argparse
import json
import urllib.request


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream an answer over HTTP.")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", default="The capital of France is")
    args = parser.parse_args()

    body = {
        "text_input": args.prompt,
        "stream": True,
        "ttft_slo_ms": 400.0,
        # Lists and dicts are only possible inside this text: HTTP parameters are plain values.
        "sampling_parameters": json.dumps({"max_tokens": 32, "temperature": 0, "stop": ["\n\n"]}),
    }
    request = urllib.request.Request(
        f"{args.url}/v2/models/{args.model}/generate_stream",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise SystemExit(event["error"])
                print(event["text_output"], end="", flush=True)
    print()


if __name__ == "__main__":
    main()
