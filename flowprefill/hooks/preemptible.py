"""flowprefill.preemptible(model): a torch module whose forward pass can be left and gone on with.

For other serving stacks; needs greenlet, and nothing else of FlowPrefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from flowprefill.hooks.boundaries import find_boundaries
from flowprefill.hooks.suspend import Forward, hook


class Preemptible:
    """A model with boundaries. Calling it starts a forward pass, which does not run yet.

    The model itself can be called as before. Passes run in inference mode.
    """

    def __init__(self, model: nn.Module, boundaries: Sequence[str] = ()) -> None:
        """boundaries: class names of the modules before which a pass may be left; by default the
        token mixer and the MLP, or mixture of experts, of each layer."""
        self.model = model
        found = find_boundaries(model, boundaries)
        self.num_boundaries = len(found.modules)
        self._handles = hook(found.modules)

    def __call__(self, *args: Any, **kwargs: Any) -> Forward:
        """A forward pass of these arguments; run it with Forward.run."""
        return Forward(partial(self.model, *args, **kwargs))

    def remove(self) -> None:
        """Take the hooks away; passes that are parked then run to their ends when they run on."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def preemptible(model: nn.Module, boundaries: Sequence[str] = ()) -> Preemptible:
    """Make a model's forward pass preemptible:

        model = flowprefill.preemptible(model)
        forward = model(input_ids=prompt, use_cache=True)
        while not forward.run(must_leave=somebody_waits):
            serve_them()
        logits = forward.result.logits

    boundaries: as in Preemptible. Raises ConfigError for a class that the model does not have.
    """
    return Preemptible(model, boundaries)
