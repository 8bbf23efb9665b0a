"""The tensors and model settings that clients of vllm_backend rely on, and our own.

Loaded twice by the Triton server (auto-completion and the instance), so it imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowprefill.errors import ConfigError

INPUTS: tuple[dict[str, Any], ...] = (
    {"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]},
    {"name": "stream", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "sampling_parameters", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    {"name": "exclude_input_in_output", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "image", "data_type": "TYPE_STRING", "dims": [-1], "optional": True},
    {"name": "return_finish_reason", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "return_cumulative_logprob", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "return_logprobs", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "return_num_input_tokens", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "return_num_output_tokens", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
    {"name": "embedding_request", "data_type": "TYPE_STRING", "dims": [1], "optional": True},
    {"name": "ttft_slo_ms", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
    {"name": "tbt_slo_ms", "data_type": "TYPE_FP32", "dims": [1], "optional": True},
    {"name": "return_timing", "data_type": "TYPE_BOOL", "dims": [1], "optional": True},
)
"""vllm_backend's inputs, then ours: two objectives, and the wish to see the request's times."""

OUTPUTS: tuple[dict[str, Any], ...] = (
    {"name": "text_output", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "finish_reason", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "cumulative_logprob", "data_type": "TYPE_FP32", "dims": [-1]},
    {"name": "logprobs", "data_type": "TYPE_STRING", "dims": [-1]},
    {"name": "num_input_tokens", "data_type": "TYPE_UINT32", "dims": [1]},
    {"name": "num_output_tokens", "data_type": "TYPE_UINT32", "dims": [-1]},
    {"name": "timing", "data_type": "TYPE_STRING", "dims": [1]},
)

UNSUPPORTED_INPUTS = ("image", "embedding_request")
"""Declared for vllm_backend's clients, which may send them empty; else UNSUPPORTED."""


def complete(auto_config: Any) -> Any:
    """Add the inputs and outputs that a pb_utils.ModelConfig lacks; what it declares is kept.

    Raises ConfigError if it declares that the model is not decoupled.
    """
    declared = auto_config.as_dict()
    if "decoupled" in declared.get("model_transaction_policy", {}):
        _check_decoupled(declared)
    known_inputs = {tensor["name"] for tensor in declared["input"]}
    known_outputs = {tensor["name"] for tensor in declared["output"]}
    for tensor in INPUTS:
        if tensor["name"] not in known_inputs:
            auto_config.add_input(tensor)
    for tensor in OUTPUTS:
        if tensor["name"] not in known_outputs:
            auto_config.add_output(tensor)
    auto_config.set_model_transaction_policy({"decoupled": True})
    auto_config.set_max_batch_size(0)
    return auto_config


def check(model_config: Mapping[str, Any], instance_kind: str) -> None:
    """Raise ConfigError for settings under which this backend cannot serve."""
    _check_decoupled(model_config)
    if instance_kind == "GPU":
        raise ConfigError(
            "instance_group kind KIND_GPU (also the server's default where a GPU is visible) is "
            "not supported: model.json chooses the device; set "
            "instance_group [ { count: 1 kind: KIND_MODEL } ]"
        )
    num_instances = sum(int(group.get("count", 1)) for group in model_config["instance_group"])
    if num_instances > 1:
        raise ConfigError(
            f"instance_group asks for {num_instances} instances: one engine serves all requests of "
            "a model; set instance_group [ { count: 1 kind: KIND_MODEL } ]"
        )


def flag(model_config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A yes/no entry of config.pbtxt `parameters`; releases differ in "yes" and "true"."""
    entry = model_config.get("parameters", {}).get(name)
    if entry is None:
        return default
    return str(entry.get("string_value", "")).lower() in ("yes", "true")


def _check_decoupled(model_config: Mapping[str, Any]) -> None:
    if not model_config.get("model_transaction_policy", {}).get("decoupled"):
        raise ConfigError(
            "FlowPrefill Triton backend must be configured to use decoupled model transaction "
            "policy: model_transaction_policy { decoupled: True }"
        )
