"""The endpoint's process: uvicorn, which drains when it is told to stop.

Started by `flowprefill serve --openai-port`; by hand: python -m flowprefill.openai.server --help.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from types import FrameType

import uvicorn

from flowprefill.open_files import allow_many_files
from flowprefill.openai.app import Endpoint, Settings, create_app

_IDLE_CONNECTION_S = 75
"""Longer than proxies and clients keep theirs: the side that closes first must not be this one."""
_LAST_BYTES_S = 2.0
"""For what was answered to reach its clients, behind the last answer or the exit timeout."""


class DrainingServer(uvicorn.Server):
    """At a stop goes on listening, refusing what is new, until the running answers have ended."""

    def __init__(self, config: uvicorn.Config, endpoint: Endpoint) -> None:
        super().__init__(config)
        self._endpoint = endpoint
        self._limit_s: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT."""
        self.drain()

    def drain(self) -> None:
        """Begin to stop."""
        if self._limit_s is None:
            self._limit_s = time.monotonic() + self._endpoint.settings.exit_timeout_s
            self._endpoint.is_draining = True

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second; True ends the server."""
        if self._limit_s is not None:
            is_late = time.monotonic() > self._limit_s + _LAST_BYTES_S
            if is_late and not self.should_exit:
                self._endpoint.end_answers()
            self.should_exit = is_late or not self._endpoint.num_live
        return await super().on_tick(counter)


def make_server(endpoint: Endpoint, host: str, port: int) -> DrainingServer:
    """A server that was not started yet."""
    config = uvicorn.Config(
        create_app(endpoint),
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=_IDLE_CONNECTION_S,
        timeout_graceful_shutdown=int(_LAST_BYTES_S),
    )
    return DrainingServer(config, endpoint)


async def _serve(server: DrainingServer, is_launched: bool) -> None:
    if is_launched:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _on_launcher_gone, server)
    await server.serve()


def _on_launcher_gone(server: DrainingServer) -> None:
    """Its end of our standard input is closed; nothing is ever written to it."""
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    server.drain()


def main() -> None:
    """Serve until SIGTERM, SIGINT, or the end of the launcher. Exit code 0 after a drain."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpc-url", required=True, help="host:port of tritonserver's gRPC")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--exit-timeout-s", type=float, default=Settings.exit_timeout_s)
    parser.add_argument("--launched", action="store_true", help="stop at the end of stdin")
    options = parser.parse_args()
    allow_many_files()
    settings = Settings(
        options.grpc_url,
        exit_timeout_s=options.exit_timeout_s,
        engines_s=None if options.launched else Settings.engines_s,
    )
    server = make_server(Endpoint(settings), options.host, options.port)
    asyncio.run(_serve(server, options.launched))


if __name__ == "__main__":
    main()
