from __future__ import annotations

import json
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils

from flowprefill.errors import ConfigError
from flowprefill_backend import contract

OPTIONAL_BOOLS = ("stream", "exclude_input_in_output", "return_finish_reason",
                  "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
                  "return_num_output_tokens", "return_timing")  # fmt: skip
EXPECTED_INPUTS = {
    "text_input": ("TYPE_STRING", [1], False),
    "sampling_parameters": ("TYPE_STRING", [1], True),
    "image": ("TYPE_STRING", [-1], True),
    "embedding_request": ("TYPE_STRING", [1], True),
    "ttft_slo_ms": ("TYPE_FP32", [1], True),
    "tbt_slo_ms": ("TYPE_FP32", [1], True),
    **{name: ("TYPE_BOOL", [1], True) for name in OPTIONAL_BOOLS},
}
EXPECTED_OUTPUTS = {
    "text_output": ("TYPE_STRING", [-1]),
    "finish_reason": ("TYPE_STRING", [-1]),
    "cumulative_logprob": ("TYPE_FP32", [-1]),
    "logprobs": ("TYPE_STRING", [-1]),
    "num_input_tokens": ("TYPE_UINT32", [1]),
    "num_output_tokens": ("TYPE_UINT32", [-1]),
    "timing": ("TYPE_STRING", [1]),
}
DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


def completed(**settings: Any) -> dict[str, Any]:
    config = {"name": "m", "max_batch_size": 0, "input": [], "output": [], **settings}
    result: dict[str, Any] = contract.complete(pb_utils.ModelConfig(json.dumps(config))).as_dict()
    return result


def test_an_empty_config_gets_all_of_vllm_backend_s_tensors_and_ours() -> None:
    config = completed()
    inputs = {
        t["name"]: (t["data_type"], t["dims"], t.get("optional", False)) for t in config["input"]
    }
    assert inputs == EXPECTED_INPUTS
    assert {t["name"]: (t["data_type"], t["dims"]) for t in config["output"]} == EXPECTED_OUTPUTS
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert config["max_batch_size"] == 0


def test_declared_tensors_are_kept_as_they_are() -> None:
    text_input = {"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]}
    config = completed(input=[text_input])
    assert [t for t in config["input"] if t["name"] == "text_input"] == [text_input]
    assert {t["name"] for t in config["input"]} == set(EXPECTED_INPUTS)


def test_a_model_that_is_not_decoupled_is_refused_in_vllm_backend_s_words() -> None:
    with pytest.raises(ConfigError, match="must be configured to use decoupled model transaction"):
        contract.check({"instance_group": []}, "MODEL")
    with pytest.raises(ConfigError, match="must be configured to use decoupled model transaction"):
        completed(model_transaction_policy={"decoupled": False})


@pytest.mark.parametrize(
    ("groups", "kind", "message"),
    [
        ([{"count": 1, "kind": "KIND_GPU"}], "GPU", "KIND_GPU"),
        ([{"count": 2, "kind": "KIND_MODEL"}], "MODEL", "2 instances"),
        ([{"count": 1}, {"count": 1}], "CPU", "2 instances"),
    ],
)
def test_placements_that_would_start_several_engines_are_refused(
    groups: list[Any], kind: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        contract.check({**DECOUPLED, "instance_group": groups}, kind)


@pytest.mark.parametrize("kind", ["MODEL", "CPU"])
def test_one_instance_is_accepted(kind: str) -> None:
    contract.check({**DECOUPLED, "instance_group": [{"count": 1}]}, kind)


@pytest.mark.parametrize(
    ("value", "expected"), [("yes", True), ("true", True), ("TRUE", True), ("no", False)]
)
def test_flags_are_read_as_each_release_spells_them(value: str, expected: bool) -> None:
    config = {"parameters": {"REPORT_CUSTOM_METRICS": {"string_value": value}}}
    assert contract.flag(config, "REPORT_CUSTOM_METRICS") is expected
    assert contract.flag({}, "REPORT_CUSTOM_METRICS") is False
