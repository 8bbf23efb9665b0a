"""A long document and short urgent questions at the same time: the short ones do not wait.

    python clients/examples/mixed_priorities.py

The objective in milliseconds is all that sets them apart. It must be one that the machine can keep:
a request that would be late at best goes behind those that can still be on time.
"""

from __future__ import annotations

import argparse
import asyncio

from flowprefill_client import AsyncClient

SLACK = 3.0
"""Objective of a question, over the time that one takes alone."""
DOCUMENT = "The committee read the report and had nothing to add to it. " * 150


async def show(client: AsyncClient, name: str, prompt: str, ttft_slo_ms: float) -> None:
    answer = await client.generate(prompt, max_tokens=8, ttft_slo_ms=ttft_slo_ms)
    print(
        f"{name:>10}  {answer.num_input_tokens:>5} tokens, first token after {answer.ttft_s:.3f} s"
    )


async def solo_ttft_ms(client: AsyncClient) -> float:
    answer = await client.generate("Question 0: what is 0 plus 0?", max_tokens=1)
    assert answer.ttft_s is not None
    return 1000 * answer.ttft_s


async def run(url: str, model: str) -> None:
    async with AsyncClient(url, model) as client:
        slo_ms = max(250.0, SLACK * await solo_ttft_ms(client))
        requests = [show(client, "document", DOCUMENT + "In short:", ttft_slo_ms=60_000)]
        for i in range(1, 4):
            question = f"Question {i}: what is {i} plus {i}?"
            requests.append(show(client, f"question {i}", question, slo_ms))
        await asyncio.gather(*requests)


def main() -> None:
    parser = argparse.ArgumentParser(description="Mix requests with different objectives.")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    asyncio.run(run(args.url, args.model))


if __name__ == "__main__":
    main()
