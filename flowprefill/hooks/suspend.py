"""A forward pass that can be left at a module and gone on with later.

The pass runs in a greenlet, and a forward pre-hook of each boundary module switches out of it. The
call stack is kept as it is, so nothing is recomputed and no bit changes, wherever it is left.

A greenlet, not a parked thread: a switch there and back takes 1.2 us here, between two threads 15
to 45 us; and all that torch keeps per thread (OpenMP's pool, number of threads, CUDA's stream, grad
mode) stays that of the one thread that runs all passes. Eight parked threads on two cores hold 16
more threads of OpenMP. Knows no scheduler, no cache and no transformers.
"""

from __future__ import annotations

import contextvars
import inspect
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

MustLeave = Callable[[], bool]
_Autocast = tuple[bool, torch.dtype, bool, torch.dtype]


class Forward:
    """One forward pass in progress. It belongs to the thread that first runs it.

    Dropped or closed before its end, it unwinds: GreenletExit is raised where it was left, which
    needs its thread. What it holds when that thread ends is never freed.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        """call: the forward pass; must not refer to this object, so that dropping it frees all. It
        sees the context variables of whoever makes this object."""
        self._suspended = _Suspended(call)
        # else it would see none of the context variables that are set here
        self._suspended.gr_context = contextvars.copy_context()
        self._thread_id: int | None = None
        self._result: Any = None
        self.is_done = False

    @property
    def result(self) -> Any:
        """What the model returned, once is_done."""
        assert self.is_done, "the forward pass is not done"
        return self._result

    @property
    def num_boundaries(self) -> int:
        """Boundaries reached so far."""
        return self._suspended.num_boundaries

    @property
    def module(self) -> nn.Module | None:
        """The module before which it was left; None before the start and after the end."""
        return self._suspended.module

    def run(self, must_leave: MustLeave | None = None) -> bool:
        """Run on, to the next boundary at which must_leave() is true. Returns is_done.

        must_leave: None = the next boundary. Raises what the model raises, and RuntimeError in
        another thread than the first time.
        """
        if self.is_done:
            return True
        self._check_thread()
        suspended = self._suspended
        if suspended.dead:
            raise RuntimeError("the forward pass has failed or was closed")
        suspended.must_leave = must_leave
        result = self._enter(suspended.switch)
        if suspended.dead:
            self._result, self.is_done, suspended.module = result, True, None
        return self.is_done

    def held_bytes(self) -> int:
        """Bytes of the tensors that the suspended pass holds, parameters left out, and caches but
        for what a boundary within attention holds of one layer's."""
        frame = self._suspended.gr_frame
        sizes: dict[int, int] = {}
        while frame is not None:
            copied = frame.f_locals
            for value in copied.values():
                _add_tensors(value, sizes)
            if type(copied) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                copied.clear()  # before CPython 3.13 the frame keeps it, and so all its tensors
            frame = frame.f_back
        return sum(sizes.values())

    def close(self) -> None:
        """End it where it was left. Closing twice, or after the end, does nothing."""
        if self._suspended.dead or self._thread_id != threading.get_ident():
            return  # dropped in another thread: greenlet ends it when its own thread switches next
        self._suspended.must_leave = _never  # what it does on its way out is not left
        self._enter(self._suspended.throw)

    def __del__(self) -> None:
        self.close()

    def _enter(self, switch: Callable[[], Any]) -> Any:
        """Switch into the pass and back. What torch keeps per thread is the pass's own meanwhile,
        and afterwards that of the passes and callers outside."""
        suspended = self._suspended
        suspended.parent = getcurrent()
        outside = _autocast()
        try:
            with torch.inference_mode():  # its end also turns off what the pass has turned on
                if suspended.autocast is not None and suspended.autocast != outside:
                    _set_autocast(suspended.autocast)
                try:
                    return switch()
                finally:
                    suspended.autocast = _autocast()
        finally:
            suspended.must_leave = None  # which may refer to this object
            if suspended.autocast != outside:
                _set_autocast(outside)

    def _check_thread(self) -> None:
        thread_id = threading.get_ident()
        if self._thread_id not in (None, thread_id):
            raise RuntimeError("a suspended forward pass runs in the thread that started it only")
        self._thread_id = thread_id


class _Suspended(greenlet):  # type: ignore[misc]
    must_leave: MustLeave | None = None
    num_boundaries = 0
    module: nn.Module | None = None
    autocast: _Autocast | None = None
    """Where it was left."""

    def reach(self, module: nn.Module) -> None:
        self.num_boundaries += 1
        if self.must_leave is None or self.must_leave():
            self.module = module
            assert self.parent is not None, "it runs, so somebody switched to it"
            self.parent.switch()


def _never() -> bool:
    return False


def _autocast() -> _Autocast:
    """Whether this thread casts, and to what, on a CPU and on CUDA. Plain calls: it is quick."""
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    return is_enabled("cpu"), dtype("cpu"), is_enabled("cuda"), dtype("cuda")


def _set_autocast(state: _Autocast) -> None:
    for kind, is_enabled, dtype in (("cpu", *state[:2]), ("cuda", *state[2:])):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)


def _at_boundary(module: nn.Module, args: object) -> None:
    current = getcurrent()
    if isinstance(current, _Suspended):  # else somebody calls the model in the ordinary way
        current.reach(module)


def hook(modules: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Make each module a boundary: a Forward can be left before it runs."""
    return [module.register_forward_pre_hook(_at_boundary) for module in modules]


def _add_tensors(value: object, sizes: dict[int, int], depth: int = 2) -> None:
    """Storages of the tensors in a local variable, or in a container of it."""
    if isinstance(value, Tensor):
        if not isinstance(value, nn.Parameter):
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    elif depth and isinstance(value, (tuple, list)):
        for item in value:
            _add_tensors(item, sizes, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            _add_tensors(item, sizes, depth - 1)
