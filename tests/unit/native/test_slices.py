"""Several slices in one call: the bits of one by one, and an end between two of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from flowprefill.clock import MonotonicClock
from flowprefill.interrupt import Interrupt
from flowprefill.programs.operators import SliceRun, slice_ends
from tests.unit.native.decoders import LAYER, Decoder, make_decoder, make_spec, random_hidden

NUM_ROWS = 660
ENDS = (128, 256, 258, 386, 650, NUM_ROWS)
"""MLP slices as narrow as the third and the last end a call where there are several threads."""

Run = Callable[[Tensor, Sequence[int], Interrupt | None], int]
"""Runs slices of the rows of a tensor in place; returns how many ran."""


@pytest.fixture(scope="module", params=[1, 2, 5], ids="{}-threads".format)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return make_decoder("native", make_spec(), torch.float32, num_threads=request.param)


@pytest.fixture(scope="module", params=["attention", "mlp"])
def work(request: pytest.FixtureRequest, decoder: Decoder) -> tuple[Tensor, Run]:
    """The operator's input, and the operator."""
    hidden = random_hidden(decoder.spec, NUM_ROWS, decoder.dtype)
    q = decoder.qkv(hidden, decoder.rows(0, 0, NUM_ROWS))
    attended = decoder.attended([0], [0])

    def attention(rows: Tensor, ends: Sequence[int], interrupt: Interrupt | None) -> int:
        run = SliceRun(slice_ends(ends), interrupt, may_leave=True)
        return decoder.operators.attention(LAYER, rows, attended, run)

    def mlp(rows: Tensor, ends: Sequence[int], interrupt: Interrupt | None) -> int:
        run = SliceRun(slice_ends(ends), interrupt, may_leave=True)
        return decoder.operators.mlp(LAYER, rows, q, run)

    return (q, attention) if request.param == "attention" else (hidden, mlp)


def test_slices_have_the_bits_of_one_slice(work: tuple[Tensor, Run]) -> None:
    rows, run = work
    whole = rows.clone()
    assert run(whole, [NUM_ROWS], None) == 1
    ends = ENDS[:2] + ENDS[3:4]  # wide ones
    out = rows.clone()
    assert run(out, ends, None) == len(ends)
    assert torch.equal(out[: ends[-1]], whole[: ends[-1]])
    assert torch.equal(out[ends[-1] :], rows[ends[-1] :])


def test_a_call_runs_one_slice_at_least_and_others_whole(work: tuple[Tensor, Run]) -> None:
    """Narrow ones may end it; whatever ran is whole, and nothing behind it was touched."""
    rows, run = work
    whole = rows.clone()
    run(whole, [NUM_ROWS], None)
    out = rows.clone()
    num_run = run(out, ENDS, None)
    end = ENDS[num_run - 1]
    assert num_run >= 2
    assert torch.equal(out[:end], whole[:end]) and torch.equal(out[end:], rows[end:])


@pytest.mark.parametrize("reason", ["raised", "time"])
def test_no_slice_begins_once_it_must_be_left(work: tuple[Tensor, Run], reason: str) -> None:
    rows, run = work
    interrupt = Interrupt(MonotonicClock())
    if reason == "raised":
        interrupt.raise_now()
    else:
        interrupt.begin_stretch(until_s=time.monotonic())
    out = rows.clone()
    assert run(out, ENDS, interrupt) == 1
    assert torch.equal(out[ENDS[0] :], rows[ENDS[0] :])
    interrupt.clear()
    interrupt.begin_stretch()
    assert run(rows.clone(), ENDS[:2], interrupt) == 2


def test_raised_meanwhile_it_ends_between_two_slices(work: tuple[Tensor, Run]) -> None:
    """Raised at some moment of the call, by another thread: wherever it ends, it ends whole."""
    rows, run = work
    whole = rows.clone()
    run(whole, [NUM_ROWS], None)
    ends = list(range(128, NUM_ROWS, 128))
    for delay_s in (0.0, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4):
        interrupt = Interrupt(MonotonicClock())
        timer = threading.Timer(delay_s, interrupt.raise_now)
        out = rows.clone()
        timer.start()
        num_run = run(out, ends, interrupt)
        timer.join()
        end = ends[num_run - 1]
        assert torch.equal(out[:end], whole[:end]) and torch.equal(out[end:], rows[end:])


def test_every_slice_behind_the_first_is_counted_as_it_begins(work: tuple[Tensor, Run]) -> None:
    rows, run = work
    interrupt = Interrupt(MonotonicClock())
    num_run = run(rows.clone(), ENDS, interrupt)
    assert interrupt.num_more_slices == num_run - 1
    interrupt.raise_now()
    assert run(rows.clone(), ENDS, interrupt) == 1
    assert interrupt.num_more_slices == num_run - 1


@pytest.mark.parametrize("reason", ["raised", "time"])
def test_a_running_call_ends_once_it_must_be_left(decoder: Decoder, reason: str) -> None:
    """A thousand slices, and a wish to leave that comes while they run."""
    num_rows = 128 * 1000
    hidden = random_hidden(decoder.spec, num_rows, decoder.dtype)
    attended = torch.zeros(num_rows, decoder.spec.q_size)
    ends = slice_ends(range(128, num_rows + 1, 128))
    interrupt = Interrupt(MonotonicClock())

    def raise_once_it_runs() -> None:
        while interrupt.num_more_slices == 0:
            pass
        interrupt.raise_now()

    raiser = threading.Thread(target=raise_once_it_runs)
    if reason == "raised":
        raiser.start()
    else:
        interrupt.begin_stretch(until_s=time.monotonic() + 1e-3)
    num_run = decoder.operators.mlp(LAYER, hidden, attended, SliceRun(ends, interrupt, True))
    if reason == "raised":
        raiser.join()
    assert 1 < num_run < len(ends)
