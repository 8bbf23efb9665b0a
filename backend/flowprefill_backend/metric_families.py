"""The metric families of a model: names, kinds, labels, buckets. docs/metrics.md defines each.

vllm:* are vllm_backend's, and the three gauges of later vLLM by which the Gateway API inference
extension routes; nv_trt_llm_* is read by tritonserver itself for ORCA. The others are ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

SLO_CLASS, REASON, BLOCKS = "slo_class", "reason", "kv_cache_block_type"
NO_CLASS = "default"
"""slo_class of requests that name none."""
UNKNOWN_CLASS = "other"
"""slo_class of requests that ended before their class was known."""
REJECT_REASONS = (
    "invalid",
    "unsupported",
    "queue_full",
    "queue_timeout",
    "infeasible",
    "unavailable",
)
"""What FlowPrefillError.reject_reason can be."""

STARTED = "flowprefill_requests_started_total"
FINISHED = "flowprefill_requests_finished_total"
CANCELLED = "flowprefill_requests_cancelled_total"
REJECTED = "flowprefill_requests_rejected_total"
FAILED = "flowprefill_requests_failed_total"
ENDED = (FINISHED, CANCELLED, REJECTED, FAILED)
"""Their sum, and flowprefill_requests_live, is STARTED."""
JUDGED = "flowprefill_requests_judged_total"
ON_TIME = "flowprefill_requests_on_time_total"
RATIO = "flowprefill_slo_attainment_ratio"
LIVE = "flowprefill_requests_live"
BLOCKS_FAMILY = "nv_trt_llm_kv_cache_block_metrics"
"""From it tritonserver makes ORCA's header."""

_VLLM_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0)  # fmt: skip
_VLLM_TPOT_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_VLLM_E2E_S = (1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_VLLM_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0)
_WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
_BLOCKING_S = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.05, 0.1, 1.0)
_ERROR_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True)
class Family:
    """One name on the metrics page. Every series also has the labels model and version."""

    name: str
    kind: Literal["COUNTER", "GAUGE", "HISTOGRAM"]
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram."""


def make_families(max_model_len: int, for_orca: bool = True) -> list[Family]:
    """All families; max_model_len bounds the buckets of token counts. for_orca: with BLOCKS_FAMILY,
    which the server looks for by its name alone: one model of a server should have it."""
    lengths = tuple(_one_two_five(max_model_len))
    families = [*_vllm_families(lengths), *_gauges(), *_request_families(), *_engine_families()]
    return [family for family in families if for_orca or family.name != BLOCKS_FAMILY]


def _vllm_families(lengths: tuple[float, ...]) -> Iterator[Family]:
    yield Family(
        "vllm:prompt_tokens_total",
        "COUNTER",
        "Prompt tokens of requests that got their first token.",
    )
    yield Family("vllm:generation_tokens_total", "COUNTER", "Generated tokens.")
    yield Family(
        "vllm:time_to_first_token_seconds",
        "HISTOGRAM",
        "Arrival to first token, seconds; only of requests that got one.",
        buckets=_VLLM_TTFT_S,
    )
    yield Family(
        "vllm:time_per_output_token_seconds",
        "HISTOGRAM",
        "Gap between two tokens of a request, seconds.",
        buckets=_VLLM_TPOT_S,
    )
    yield Family(
        "vllm:e2e_request_latency_seconds",
        "HISTOGRAM",
        "Arrival to last response of finished requests, seconds.",
        buckets=_VLLM_E2E_S,
    )
    for name, what in (("prompt", "Prompt"), ("generation", "Generated")):
        yield Family(
            f"vllm:request_{name}_tokens",
            "HISTOGRAM",
            f"{what} tokens of finished requests.",
            buckets=lengths,
        )
    for name in ("best_of", "n"):
        yield Family(
            f"vllm:request_params_{name}",
            "HISTOGRAM",
            f"Sampling parameter {name} of finished requests; always 1.",
            buckets=_VLLM_COUNTS,
        )


def _gauges() -> Iterator[Family]:
    yield Family(
        "vllm:num_requests_waiting", "GAUGE", "Requests whose prefill has not begun, parsing too."
    )
    yield Family("vllm:num_requests_running", "GAUGE", "Begun prefills and decoding requests.")
    yield Family(
        "vllm:kv_cache_usage_perc", "GAUGE", "Share of the KV blocks that requests hold, 0 to 1."
    )
    yield Family(
        "vllm:cache_config_info",
        "GAUGE",
        "1 for the cache in use; the labels say what it is.",
        labels=("block_size", "num_gpu_blocks"),
    )
    yield Family(
        BLOCKS_FAMILY,
        "GAUGE",
        "KV blocks by type; tokens_per is the tokens of one block, fraction is used / max.",
        labels=(BLOCKS,),
    )
    yield Family(
        "flowprefill_parked_bytes",
        "GAUGE",
        "Bytes of tensors that begun prefills hold beside their KV blocks.",
    )
    yield Family(LIVE, "GAUGE", "Requests started and not ended.")
    yield Family(
        "flowprefill_engine_ready", "GAUGE", "1 if the engine process takes requests, else 0."
    )
    yield Family(
        RATIO,
        "GAUGE",
        "On time / judged, since the model was loaded; no series before the first judged one.",
        labels=(SLO_CLASS,),
    )


def _request_families() -> Iterator[Family]:
    yield Family(STARTED, "COUNTER", "Requests that arrived.")
    yield Family(FINISHED, "COUNTER", "Answered in full.")
    yield Family(CANCELLED, "COUNTER", "Ended by their clients.")
    yield Family(
        REJECTED, "COUNTER", "Refused before their first token, by reason.", labels=(REASON,)
    )
    yield Family(FAILED, "COUNTER", "Ended by a fault.")
    yield Family(
        JUDGED,
        "COUNTER",
        "Ended requests for which it is decided whether they were on time.",
        labels=(SLO_CLASS,),
    )
    yield Family(
        ON_TIME,
        "COUNTER",
        "Of these, first token within its objective; the rate is the goodput.",
        labels=(SLO_CLASS,),
    )
    yield Family(
        "flowprefill_time_to_first_token_seconds",
        "HISTOGRAM",
        "Arrival to first token, seconds; only of requests that got one.",
        labels=(SLO_CLASS,),
        buckets=_WAIT_S,
    )
    yield Family(
        "flowprefill_queue_seconds",
        "HISTOGRAM",
        "Arrival to first slice on the device, seconds; of requests that got their first token.",
        labels=(SLO_CLASS,),
        buckets=_WAIT_S,
    )
    yield Family(
        "flowprefill_blocking_seconds",
        "HISTOGRAM",
        "In the engine's inbox to first slice of requests that took the device from others.",
        buckets=_BLOCKING_S,
    )
    yield Family(
        "flowprefill_prefill_prediction_error_ratio",
        "HISTOGRAM",
        "|predicted / measured - 1| of a prefill's device time.",
        buckets=_ERROR_RATIOS,
    )


def _engine_families() -> Iterator[Family]:
    for name, description in {
        "preemptions": "Times a prefill was left for another one.",
        "evictions": "Times a request lost its KV blocks to a more urgent one.",
        "decisions": "Decisions of the scheduler.",
        "decision_seconds": "Time that decisions took, seconds.",
        "slices": "Slices run.",
        "cached_prompt_tokens": "Prompt tokens that were found in the KV cache.",
        "engine_restarts": "Engine processes that replaced a dead one.",
    }.items():
        yield Family(f"flowprefill_{name}_total", "COUNTER", description)


def _one_two_five(limit: int) -> Iterator[float]:
    """1, 2, 5, 10, 20, ... up to `limit`."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if factor * power > limit:
                return
            yield float(factor * power)
        power *= 10
