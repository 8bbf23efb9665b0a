"""Main of a rank that follows rank 0. Started by parallel.ranks only.

    python -m flowprefill.follower SOCKET_FD STOP_WORD_FD

Threads: main loads this rank's part of the model and runs its slices; a reader takes in what rank 0
sends. The process lives at most as long as rank 0: at the socket's EOF it exits at once, whatever
it is doing.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from flowprefill.child_process import EXIT_CRASHED, handle_messages, live_with_parent
from flowprefill.config import EngineConfig
from flowprefill.errors import FlowPrefillError
from flowprefill.loading import PartPlan, load_part
from flowprefill.parallel.collectives import Collectives, find_store
from flowprefill.parallel.errors import RankError
from flowprefill.parallel.following import Follower
from flowprefill.parallel.messages import PassReader
from flowprefill.parallel.stop_word import StopWord
from flowprefill.wire import Channel, Kind, Message, pack, pack_error

FLUSH_S = 2.0


class Rank:
    """One rank behind one channel."""

    def __init__(
        self, channel: Channel, word: StopWord, before_slice: Callable[[], object] | None
    ) -> None:
        self._channel = channel
        self._word = word
        self._before_slice = before_slice
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def run(self) -> NoReturn:
        """Load and follow until CLOSE. Never returns."""
        threading.Thread(target=self._read, name="rank-reader", daemon=True).start()
        try:
            self._load().follow()
        except FlowPrefillError as error:
            failure = error
        except Exception as error:
            traceback.print_exc()
            failure = RankError(f"{type(error).__name__}: {error}")
        self._channel.send(pack(Kind.FAILED, pack_error(failure)))
        self._channel.flush(FLUSH_S)
        os._exit(EXIT_CRASHED)

    def _load(self) -> Follower:
        start = self._expect(Kind.START)
        plan = PartPlan.from_wire(start["plan"])
        part = load_part(EngineConfig.from_dict(start["config"]), plan, start["rank"])
        self._channel.send(pack(Kind.LOADED, part.num_blocks))
        num_blocks = self._expect(Kind.ALLOCATE)
        device, store = part.device.torch_device, find_store(start["port"])
        collectives = Collectives(store, start["rank"], plan.num_ranks, device)
        program, _ = part.build(num_blocks, collectives.sum)
        reader = PassReader(part.config.block_size, device)
        follower = Follower(program, reader, self._word, self._messages, self._before_slice)
        self._channel.send(pack(Kind.READY))
        return follower

    def _expect(self, kind: Kind) -> Any:
        found, body = self._messages.get()
        assert found is kind, f"{found} instead of {kind}"
        return body

    def _read(self) -> NoReturn:
        handle_messages(self._channel.receive, self._handle)

    def _handle(self, kind: Kind, body: Any) -> None:
        if kind is Kind.CLOSE:
            os._exit(0)
        self._messages.put((kind, body))


def main(before_slice: Callable[[], object] | None = None) -> NoReturn:
    live_with_parent()
    socket_fd, word_fd = map(int, sys.argv[1:])
    Rank(Channel(socket.socket(fileno=socket_fd)), StopWord(word_fd), before_slice).run()


if __name__ == "__main__":
    main()
