"""Which modules of a model are boundaries, by their types. Knows no architecture by name.

A decoder is a list of layers, and a layer's parts are its token mixer (attention, state space) and
its MLP or mixture of experts. Each part is a boundary; norms are too small to be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from flowprefill.errors import ConfigError


@dataclass(frozen=True)
class Boundaries:
    """The modules before which a forward pass can be left."""

    modules: tuple[nn.Module, ...]
    layer_starts: frozenset[int]
    """ids of those that are the first of their layer."""

    def starts_layer(self, module: nn.Module | None) -> bool:
        return id(module) in self.layer_starts


def find_boundaries(model: nn.Module, class_names: Sequence[str] = ()) -> Boundaries:
    """The boundaries of a model.

    class_names: of the modules to take, instead of the parts of its layers; "Linear" gives the
    finest. Raises ConfigError for a name that the model has no module of, and for a compiled model,
    whose pass cannot be left.
    """
    _check_eager(model)
    layers = decoder_layers(model)
    if not class_names:
        parts = [p for layer in layers for p in _parts(layer) or [layer]]
    else:
        _check_names(model, class_names)
        parts = [m for m in model.modules() if type(m).__name__ in class_names]
    by_id = {id(m) for m in parts}
    firsts = [next((m for m in layer.modules() if id(m) in by_id), None) for layer in layers]
    return Boundaries(tuple(parts), frozenset(id(m) for m in firsts if m is not None))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The modules of the longest outermost list of modules; [model] if it has none."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        return [model]
    inner = {id(m) for one in lists for layer in one for m in layer.modules()}
    outermost = [one for one in lists if id(one) not in inner]
    lengths = [len(one) for one in outermost]
    return list(outermost[lengths.index(max(lengths))])


def class_names(model: nn.Module) -> list[str]:
    """Names that an override may choose from."""
    return sorted({type(m).__name__ for m in model.modules() if m is not model})


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Direct children that hold weights, as parameters or packed in buffers, and are no norms."""
    return [
        child
        for child in layer.children()
        if not type(child).__name__.endswith("Norm")
        and any(w.dim() > 1 for w in (*child.parameters(), *child.buffers()))
    ]


def _check_eager(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            raise ConfigError(f"{type(module).__name__} is compiled: hook the model without that")


def _check_names(model: nn.Module, names: Sequence[str]) -> None:
    known = class_names(model)
    for name in names:
        if name not in known:
            raise ConfigError(
                f"model.json: hook_boundaries: the model has no module of class {name!r}; it has: "
                f"{', '.join(known)}"
            )
