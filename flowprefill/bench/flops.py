"""Arithmetic that a prefill needs, from the model's shape. Pure: no torch."""

from __future__ import annotations

from flowprefill.programs.model_spec import ModelSpec


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """(in, out) features of the matrices of one layer, fused as the program multiplies them."""
    return {
        "qkv": (spec.hidden_size, spec.q_size + 2 * spec.kv_size),
        "o": (spec.q_size, spec.hidden_size),
        "gate_up": (spec.hidden_size, 2 * spec.intermediate_size),
        "down": (spec.intermediate_size, spec.hidden_size),
    }


def prefill_flops(spec: ModelSpec, num_tokens: int) -> int:
    """Floating-point operations of the matrix products of one prefill, two for each multiply-add.

    Only what a first token needs: of the last layer all rows give K and V (and, in the same
    product, queries), but attention, output projection and MLP are one row's, as are the logits.
    Causal attention: a row reads the keys up to its own. Norms, rotation and softmax do not count.
    """
    macs = {name: rows * columns for name, (rows, columns) in weight_shapes(spec).items()}
    full_layers = spec.num_layers - 1
    own_rows = full_layers * num_tokens + 1
    linear = spec.num_layers * num_tokens * macs["qkv"]
    linear += own_rows * (macs["o"] + macs["gate_up"] + macs["down"])
    linear += spec.hidden_size * spec.vocab_size
    keys_read = full_layers * num_tokens * (num_tokens + 1) // 2 + num_tokens
    attention = 2 * spec.q_size * keys_read  # scores, then their product with the values
    return 2 * (linear + attention)
