"""The servers that `flowprefill bench servers` can start: ours, and peers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial

from flowprefill.bench.peers.servers import MODEL_NAME, sends_priority, serve_peer
from flowprefill.bench.peers.spec import Conditions, PeerSpec
from flowprefill.bench.server_runs import Contender, Running
from flowprefill.bench.servers import model_name, serve_policies
from flowprefill.config import EngineConfig
from flowprefill.replay.http_targets import OpenAITarget
from flowprefill.replay.targets import GrpcTarget
from flowprefill.version import __version__
from flowprefill_client import Client


def our_contender(name: str, config: EngineConfig, guesses: tuple[float, float]) -> Contender:
    """A tritonserver with one engine."""
    return Contender(name, partial(_start_ours, config), guesses)


@contextlib.contextmanager
def _start_ours(config: EngineConfig) -> Iterator[Running]:
    model = model_name(config.policy)
    with serve_policies(config, [config.policy]) as url, Client(url, model) as client:
        version = f"flowprefill {__version__}"
        yield Running(version, partial(GrpcTarget, url, model), client.engine_stats)


def peer_contender(
    spec: PeerSpec, conditions: Conditions, guesses: tuple[float, float]
) -> Contender:
    """One of another project."""
    settings = json.dumps({"worker": spec.worker, **spec.options}, sort_keys=True)
    return Contender(spec.name, partial(_start_peer, spec, conditions), guesses, settings)


@contextlib.contextmanager
def _start_peer(spec: PeerSpec, conditions: Conditions) -> Iterator[Running]:
    priority = sends_priority(spec)
    with serve_peer(spec, conditions) as server:
        make_target = partial(OpenAITarget, server.url, MODEL_NAME, send_priority=priority)
        yield Running(server.version, make_target, stopped=server.stopped)
