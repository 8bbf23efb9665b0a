"""A forward pass can be left at a module, and what it holds comes back when it is dropped."""

from __future__ import annotations

import contextvars
import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import flowprefill
from flowprefill.errors import ConfigError
from flowprefill.hooks.boundaries import find_boundaries
from tests.unit.hooks.tiny import make_model


class Net(nn.Module):
    """Three layers, each of which remembers that it was unwound."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.num_unwound = 0
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        try:
            for layer in self.layers:
                x = layer(x)
            if self.fails:
                raise ValueError("broken")
            return x
        finally:
            self.num_unwound += 1


def test_runs_to_the_next_boundary_and_gives_the_same_bits() -> None:
    net, x = Net(), torch.randn(4, 8)
    expected = net(x)
    model = flowprefill.preemptible(net)
    assert model.num_boundaries == 3
    forward = model(x)
    assert [forward.run() for _ in range(4)] == [False, False, False, True]
    assert torch.equal(forward.result, expected)


def test_is_left_only_where_it_must_be() -> None:
    model = flowprefill.preemptible(Net())
    forward, looks = model(torch.randn(4, 8)), []
    assert forward.run(lambda: looks.append(1) or len(looks) == 2) is False
    assert forward.num_boundaries == 2
    assert forward.run(lambda: False)


def test_two_passes_are_under_way_at_once() -> None:
    net = Net()
    model, inputs = flowprefill.preemptible(net), [torch.randn(4, 8) for _ in range(2)]
    first, second = (model(x) for x in inputs)
    while not (first.run() & second.run()):
        pass
    assert torch.equal(first.result, net(inputs[0])) and torch.equal(second.result, net(inputs[1]))


def test_the_model_can_be_called_in_the_ordinary_way_meanwhile() -> None:
    net, x = Net(), torch.randn(4, 8)
    forward = flowprefill.preemptible(net)(x)
    forward.run()
    plain = net(x)
    assert plain.requires_grad, "a parked pass leaves the thread's grad mode alone"
    assert forward.run(lambda: False) and torch.equal(forward.result, plain)


def test_a_dropped_pass_unwinds_at_once_and_frees_what_it_held() -> None:
    net = Net()
    model, x = flowprefill.preemptible(net), torch.randn(4, 8)
    forward = model(x)
    forward.run()
    held = weakref.ref(x)
    gc.disable()  # at once, not when somebody collects cycles
    try:
        del x, forward
        assert net.num_unwound == 1 and held() is None
    finally:
        gc.enable()
    assert torch.is_grad_enabled()


def test_an_error_in_the_model_reaches_who_runs_the_pass() -> None:
    net = Net()
    net.fails = True
    forward = flowprefill.preemptible(net)(torch.randn(4, 8))
    with pytest.raises(ValueError, match="broken"):
        forward.run(lambda: False)
    with pytest.raises(RuntimeError, match="has failed"):
        forward.run()


def test_another_thread_cannot_go_on_with_it() -> None:
    forward = flowprefill.preemptible(Net())(torch.randn(4, 8))
    forward.run()
    errors: list[Exception] = []

    def go_on() -> None:
        try:
            forward.run()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=go_on)
    thread.start()
    thread.join()
    assert "the thread that started it" in str(errors[0])
    assert forward.run(lambda: False)


def test_says_what_a_parked_pass_holds() -> None:
    model = flowprefill.preemptible(Net())
    forward = model(torch.randn(1000, 8))
    forward.run()
    assert 1000 * 8 * 4 <= forward.held_bytes() <= 3 * 1000 * 8 * 4


def test_boundaries_are_parts_of_layers_or_what_an_override_names() -> None:
    moe = make_model("Mixtral")
    assert flowprefill.preemptible(moe).num_boundaries == 3 * 2
    fine = flowprefill.preemptible(make_model("Llama"), boundaries=["Linear"])
    assert fine.num_boundaries == 3 * 7 + 1
    with pytest.raises(ConfigError, match=r"no module of class 'Lineal'; it has: .*LlamaMLP"):
        flowprefill.preemptible(make_model("Llama"), boundaries=["Lineal"])


class Packed(nn.Module):
    """Holds weights as GPTQ and AWQ do: no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(8, 8, dtype=torch.int32))
        self.register_buffer("g_idx", torch.zeros(8, dtype=torch.int32))


class PackedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm = nn.LayerNorm(8)
        self.mixer = nn.Sequential(Packed())
        self.act = nn.SiLU()
        self.mlp = nn.Sequential(Packed(), Packed())


def test_weights_packed_in_buffers_make_a_part_too() -> None:
    layers = nn.ModuleList(PackedLayer() for _ in range(3))
    model = nn.ModuleDict({"layers": layers})
    expected = [part for layer in layers for part in (layer.mixer, layer.mlp)]
    assert list(find_boundaries(model).modules) == expected


def test_removed_hooks_leave_no_boundaries() -> None:
    model = flowprefill.preemptible(Net())
    model.remove()
    assert model(torch.randn(4, 8)).run()


def test_looking_at_what_it_holds_keeps_nothing() -> None:
    net = Net()
    outputs: list[weakref.ref[Tensor]] = []
    net.layers[0].register_forward_hook(lambda *call: outputs.append(weakref.ref(call[-1])))
    forward = flowprefill.preemptible(net)(torch.randn(1000, 8))
    forward.run()
    forward.run()
    assert outputs[0]() is not None and forward.held_bytes() > 0
    forward.run()
    assert outputs[0]() is None, "it was replaced by what the second layer gave"


def test_what_decides_may_refer_to_the_pass() -> None:
    net = Net()
    forward = flowprefill.preemptible(net)(torch.randn(4, 8))
    gc.disable()
    try:
        forward.run(lambda one=forward: one.num_boundaries == 2)
        del forward
        assert net.num_unwound == 1
    finally:
        gc.enable()


class Tidy(Net):
    """Runs a layer on its way out."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        finally:
            self.layers[0](x)
            self.num_unwound += 1


def test_a_closed_pass_is_not_left_on_its_way_out() -> None:
    net = Tidy()
    forward = flowprefill.preemptible(net)(torch.randn(4, 8))
    forward.run()
    forward.close()
    assert net.num_unwound == 2
    with pytest.raises(RuntimeError, match="was closed"):
        forward.run()


class Casting(Net):
    """Computes in bfloat16 whatever is set outside."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


def test_autocast_of_a_parked_pass_is_its_own() -> None:
    net, x = Casting(), torch.randn(4, 8)
    expected = net(x)
    assert expected.dtype is torch.bfloat16
    model = flowprefill.preemptible(net)
    forward, dropped = model(x), model(x)
    for one in (forward, dropped):
        one.run()
        assert not torch.is_autocast_enabled("cpu"), "it is for the pass alone"
    del one, dropped
    assert not torch.is_autocast_enabled("cpu")
    assert forward.run(lambda: False) and torch.equal(forward.result, expected)
    assert not torch.is_autocast_enabled("cpu")


def test_a_pass_that_began_under_autocast_goes_on_under_it() -> None:
    net, x = Net(), torch.randn(4, 8)
    forward = flowprefill.preemptible(net)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = net(x)
        forward.run()
    assert forward.run(lambda: False) and torch.equal(forward.result, expected)


ASKED: contextvars.ContextVar[str] = contextvars.ContextVar("asked", default="nothing")


class Asking(Net):
    """Tells what a context variable was at its begin and end."""

    def forward(self, x: Tensor) -> Tensor:
        self.found = [ASKED.get()]
        ASKED.set("its own")
        x = super().forward(x)
        self.found.append(ASKED.get())
        return x


def test_context_variables_are_those_of_the_caller_and_then_its_own() -> None:
    net = Asking()
    token = ASKED.set("the caller's")
    try:
        forward = flowprefill.preemptible(net)(torch.randn(4, 8))
        forward.run()
        assert ASKED.get() == "the caller's"
        forward.run(lambda: False)
    finally:
        ASKED.reset(token)
    assert net.found == ["the caller's", "its own"]


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="compiled"):
        flowprefill.preemptible(torch.compile(Net(), backend="eager"))
    net = Net()
    net.layers[1].compile(backend="eager")
    with pytest.raises(ConfigError, match="Sequential is compiled"):
        flowprefill.preemptible(net)
