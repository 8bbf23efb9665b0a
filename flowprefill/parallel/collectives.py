"""Sums over the ranks: torch.distributed, by NCCL on CUDA and gloo on a CPU. Knows no models.

All ranks are on one machine. They find each other through a store that rank 0 keeps on the loopback
interface. A process takes part in one group at a time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed does not export them
from torch.distributed import distributed_c10d

from flowprefill.errors import ConfigError
from flowprefill.parallel.errors import RankError

COLLECTIVE_TIMEOUT_S = 60.0
"""Ranks that are further apart are lost; who hangs is found sooner, by the engine's supervisor."""
ABORT_S = 2.0
"""What NCCL has to let go of sums that are not finished."""
_HOST = "127.0.0.1"


def open_store() -> TCPStore:
    """Rank 0's; its port is where the others find it. Raises ConfigError if this process has a
    group."""
    if dist.is_initialized():
        raise ConfigError(
            "model.json: tensor_parallel_size: another model of this process has ranks; must be 1 "
            "for all but one"
        )
    with socket.socket() as listener:
        listener.bind((_HOST, 0))
        port = listener.getsockname()[1]
        # its own socket would be open to other machines
        return TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            master_listen_fd=listener.detach(),
        )


def find_store(port: int) -> TCPStore:
    """The one that rank 0 keeps."""
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    return TCPStore(_HOST, port, is_master=False, timeout=timeout)


class Collectives:
    """This process among the ranks. Each operation must be called by all of them, in one order."""

    def __init__(self, store: Store, rank: int, num_ranks: int, device: torch.device) -> None:
        """Returns when all ranks are there. Raises RankError if they do not come."""
        self._num_ranks = num_ranks
        self._is_cuda = device.type == "cuda"
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        excepthook = sys.excepthook
        try:
            dist.init_process_group(
                "nccl" if self._is_cuda else "gloo",
                store=store,
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
                device_id=device if self._is_cuda else None,
            )
        except RuntimeError as error:
            raise RankError(f"the ranks do not find each other: {error}") from error
        finally:
            sys.excepthook = excepthook  # torch's would print for us, too
        self._store = store  # lives as long as the group

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each. Raises RankError if one does not come.

        partial: [num_rows, columns], may be overwritten; the result has its shape and dtype
        """
        try:
            if self._is_cuda:
                dist.all_reduce(partial)
                return partial
            return self._sum_in_order(partial)
        except RuntimeError as error:
            raise RankError(f"a sum over the ranks failed: {error}") from error

    def _sum_in_order(self, partial: Tensor) -> Tensor:
        """Gloo's own sum adds in an order that depends on where a value lies among all rows. This
        one gives a row the same bits whatever shares the call."""
        parts = [torch.empty_like(partial) for _ in range(self._num_ranks)]
        dist.all_gather(parts, partial)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return total.to(partial.dtype)

    def abort(self) -> None:
        """A rank is gone: let sums end that wait for it. From any thread; bounded."""
        group = dist.group.WORLD
        if self._is_cuda and group is not None:
            _within_abort_s(group.abort)  # gloo finds out by itself, NCCL's kernels spin for ever

    def close(self) -> None:
        """Leave the group, without the others; bounded."""
        if not dist.is_initialized():
            return
        if self._is_cuda:
            # to destroy it waits for the others, who may be gone, and for sums in flight
            _within_abort_s(distributed_c10d._abort_process_group)
        else:
            dist.destroy_process_group()


def _within_abort_s(work: Callable[[], object]) -> None:
    """On a thread of its own, which is left behind if the driver keeps it."""

    def run() -> None:
        with contextlib.suppress(Exception):  # nothing is left that could be done
            work()

    thread = threading.Thread(target=run, name="rank-abort", daemon=True)
    thread.start()
    thread.join(ABORT_S)
