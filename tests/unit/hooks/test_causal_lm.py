"""What the cache of a model allows is tried at load, and what it does not is not done."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flowprefill.errors import ModelLoadError, UnsupportedArchitectureError
from flowprefill.granularity import Granularity
from flowprefill.hooks.causal_lm import CausalLM, cache_bytes
from tests.unit.hooks.tiny import (
    CONFIGS,
    SIZES,
    make_model,
    make_program,
    prompt,
    prompt_input,
    run_to_end,
    table,
)


def test_states_beside_the_layers_are_counted_and_never_batched() -> None:
    """MiniMax holds them in a class of its own, and counts positions by a layer without keys."""
    lm = make_program("MiniMax").lm
    assert not lm.is_batched
    forward = lm.start(prompt(8), None)
    forward.run(lambda: False)
    cache = lm.cache_of(forward)
    states = sum(state.nbytes for state in cache.linear_cache if len(state))
    assert states == 2 * 4 * 8 * 8 * 4
    assert lm.sequence_bytes >= states and cache_bytes(cache) >= states


def test_a_cache_that_needs_the_whole_prompt_again_is_refused_by_name() -> None:
    import transformers

    config = transformers.CpmAntConfig(
        vocab_size=97, hidden_size=32, num_attention_heads=4, dim_head=8, dim_ff=48,
        num_hidden_layers=2, prompt_length=4,
    )  # fmt: skip
    model = transformers.CpmAntForCausalLM(config).eval()
    with pytest.raises(UnsupportedArchitectureError, match=r"CpmAntForCausalLM: .* with its cache"):
        CausalLM(model)


class KeepsItsState:
    """A convolution over two tokens: the last one is kept here, not in the cache."""

    last: torch.Tensor

    def __call__(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        one_more = output.shape[1] == 1
        first = self.last if one_more else torch.zeros_like(output[:, :1])
        self.last = output[:, -1:]
        return output + torch.cat([first, output[:, :-1]], dim=1)


def test_a_model_that_mixes_up_sequences_is_refused_by_name() -> None:
    model = make_model("Llama")
    model.model.layers[0].mlp.register_forward_hook(KeepsItsState())  # type: ignore[union-attr]
    with pytest.raises(UnsupportedArchitectureError, match=r"LlamaForCausalLM: .* with its cache"):
        CausalLM(model)


def test_positions_of_a_model_s_own_are_left_to_it() -> None:
    """Roberta's begin behind that of padding: the ones of a batch would be wrong."""
    import transformers

    config = transformers.RobertaConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=128, is_decoder=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.RobertaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    lm = CausalLM(model)
    assert lm.is_continued and not lm.is_batched


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("Mamba", "MiniMax")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_hides_nothing_of_what_a_cache_allows(name: str, dtype: torch.dtype) -> None:
    lm = CausalLM(make_model(name).to(dtype))
    assert lm.is_continued
    assert lm.is_batched == (name not in ("Gemma3", "Mistral"))


MOVING = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64,
                 "short_factor": [1.0] * 4, "long_factor": [4.0] * 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", MOVING)
def test_embeddings_that_follow_the_length_see_whole_prompts(kind: str) -> None:
    """And each prompt as if it were the first, whatever has run before, also beside it."""
    rope = {"rope_theta": 10_000.0, **MOVING[kind]}
    more = {"rope_parameters": rope, "max_position_embeddings": 64}
    program = make_program("Llama", **more)
    assert not program.lm.is_batched
    found = []
    for length in (100, 200, 100, 30):
        state = program.prefill([prompt_input(prompt(length), table())], Granularity("tile"))
        state.run_slice()
        run_to_end(program.prefill([prompt_input(prompt(150), table(1))], Granularity("tile")))
        found.append(run_to_end(state)[0])
        with torch.inference_mode():
            tokens = torch.tensor([prompt(length)])
            expected = make_model("Llama", **more)(input_ids=tokens).logits[0, -1]
        torch.testing.assert_close(found[-1], expected, rtol=1e-3, atol=1e-3)
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", ["dynamic", "default"])
def test_the_kind_of_embeddings_is_read_in_the_configuration_of_text(kind: str) -> None:
    import transformers

    rope = {"rope_theta": 10_000.0, "factor": 4.0, "rope_type": kind}
    text = {**SIZES, **CONFIGS["Gemma3"]}
    text["rope_parameters"] = dict.fromkeys(("full_attention", "sliding_attention"), rope)
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 16, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    lm = CausalLM(transformers.Gemma3ForConditionalGeneration(config).eval())
    assert lm.is_continued == (kind == "default")


class Broken(nn.Module):
    """Fails in its first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2)])

    def forward(
        self, input_ids: torch.Tensor, past_key_values: object = None, **kw: object
    ) -> None:
        raise KeyError("no_such_kind")


def test_a_model_that_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(ModelLoadError, match="Broken: a pass over 8 tokens fails: KeyError: 'no_"):
        CausalLM(Broken())
