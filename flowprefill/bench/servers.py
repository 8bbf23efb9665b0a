"""A tritonserver for a benchmark: the same model in several configurations, on free ports."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from flowprefill.config import EngineConfig
from flowprefill.server import ServerOptions, TritonServer, free_ports


@contextlib.contextmanager
def serve_policies(config: EngineConfig, policies: Sequence[str]) -> Iterator[str]:
    """Run a tritonserver with one model per policy; yields its gRPC address, host:port."""
    models = {model_name(p): with_policy(config, p) for p in policies}
    with serve_models(models) as url:
        yield url


@contextlib.contextmanager
def serve_models(models: Mapping[str, EngineConfig]) -> Iterator[str]:
    """Run a tritonserver with these models by name; yields its gRPC address, host:port."""
    with tempfile.TemporaryDirectory(prefix="flowprefill-bench-") as directory:
        for name, config in models.items():
            write_model(Path(directory) / name, config)
        # One after the other, so that engines do not disturb each other's calibration.
        options = dataclasses.replace(
            on_free_ports(Path(directory)), extra_args=("--model-load-thread-count=1",)
        )
        with sigterm_raises(), TritonServer(options) as server:
            yield server.grpc_url


def on_free_ports(repository: Path) -> ServerOptions:
    """Options of a server of this machine alone, on ports that nobody has."""
    http_port, grpc_port, metrics_port = free_ports(3)
    return ServerOptions(
        repository, http_port=http_port, grpc_port=grpc_port, metrics_port=metrics_port
    )


@contextlib.contextmanager
def sigterm_raises() -> Iterator[None]:
    """Make SIGTERM an exception, so that a benchmark that is ended ends its server too."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def write_model(directory: Path, config: EngineConfig) -> None:
    """Make `directory` that of a model which serves `config`."""
    version = directory / "1"
    version.mkdir(parents=True)
    (directory / "config.pbtxt").write_text(
        'backend: "flowprefill"\ninstance_group [ { count: 1 kind: KIND_MODEL } ]\n'
    )
    (version / "model.json").write_text(json.dumps(config.to_dict()))


def model_name(policy: str) -> str:
    """The name under which the model of a policy, or of `program/policy`, is served."""
    return "hol_" + policy.replace("-", "_").replace("/", "_")


def with_policy(config: EngineConfig, policy: str) -> EngineConfig:
    """The same configuration under another policy. Raises ConfigError for one that is not known."""
    return dataclasses.replace(config, policy=policy)  # type: ignore[arg-type]
