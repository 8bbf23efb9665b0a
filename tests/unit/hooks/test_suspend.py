"""A forward pass can be left at a module, and what it holds comes back when it is dropped."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

import flowprefill
from flowprefill.errors import ConfigError
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


def test_removed_hooks_leave_no_boundaries() -> None:
    model = flowprefill.preemptible(Net())
    model.remove()
    assert model(torch.randn(4, 8)).run()
