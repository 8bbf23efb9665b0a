"""The command line, without a server or an engine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from flowprefill import __version__
from flowprefill.bench.options import finite
from flowprefill.cli import app
from flowprefill.openai.process import OpenAIProcess
from flowprefill.serve import ready_text
from flowprefill.server import ServerOptions, TritonServer
from flowprefill.server_layout import default_model_repository


def flowprefill(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from flowprefill.cli import main; main()"
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_version_is_the_package_s() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.output.strip() == __version__


def test_help_lists_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    for command in ("serve", "generate", "bench", "version"):
        assert command in result.output


def test_help_loads_no_engine_and_no_client() -> None:
    code = "import sys, flowprefill.cli; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_option_that_is_a_float_must_be_finite() -> None:
    """Of NaN no comparison with a limit holds, so limits alone let it through."""
    found = 0
    for command in commands_of(app):
        for name, hint in get_type_hints(command, include_extras=True).items():
            kind, *options = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            if float in (kind, *get_args(kind)):
                assert options[0].callback is finite, f"{command.__module__} {name}"
                found += 1
    assert found > 15


def commands_of(group: typer.Typer) -> Iterator[Callable[..., None]]:
    """Of it and its groups."""
    yield from (command.callback for command in group.registered_commands if command.callback)
    for inner in group.registered_groups:
        if inner.typer_instance:
            yield from commands_of(inner.typer_instance)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_what_is_no_finite_number_is_a_usage_error(value: str) -> None:
    for arguments in (
        ("simulate", "--trace", "t.csv", "--load", value),
        ("simulate", "--trace", "t.csv", "--length-divisor", value),
        ("bench", "goodput", "--trace", "t.csv", "--length-divisor", value),
        ("generate", "--prompt", "x", "--temperature", value),
    ):
        assert CliRunner().invoke(app, list(arguments)).exit_code == 2


def test_failed_start_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = flowprefill("serve", "--model-repository", str(tmp_path / "nowhere"))
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"error: no model repository at {tmp_path / 'nowhere'}")
    assert "Traceback" not in done.stderr


@pytest.fixture
def serve_models() -> Iterator[Callable[[dict[str, bool]], TritonServer]]:
    """Answers as a tritonserver with the models given: name -> whether decoupled."""
    models: dict[str, bool] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v2/repository/index"
            self.answer([{"name": name, "version": "1", "state": "READY"} for name in models])

        def do_GET(self) -> None:
            name = self.path.removeprefix("/v2/models/").removesuffix("/config")
            self.answer({"model_transaction_policy": {"decoupled": models[name]}})

        def answer(self, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        threading.Thread(target=http_server.serve_forever).start()

        def start(served: dict[str, bool]) -> TritonServer:
            models.update(served)
            return TritonServer(ServerOptions(Path(), http_port=http_server.server_port))

        yield start
        http_server.shutdown()


@pytest.mark.parametrize(
    ("models", "named"),
    [
        ({"mistral": False, "qwen": True, "yi": True}, "/v2/models/qwen/generate"),
        ({"b": False, "a": False}, "/v2/models/a/generate"),
    ],
)
def test_ready_text_names_a_model_that_is_there(
    serve_models: Callable[[dict[str, bool]], TritonServer], models: dict[str, bool], named: str
) -> None:
    assert named in ready_text(serve_models(models), None)


def test_ready_text_without_a_model_has_nothing_to_try(
    serve_models: Callable[[dict[str, bool]], TritonServer],
) -> None:
    assert ready_text(serve_models({}), None).count("\n") == 0


def test_ready_text_names_the_openai_endpoint(
    serve_models: Callable[[dict[str, bool]], TritonServer],
) -> None:
    for host, shown in (("0.0.0.0", "127.0.0.1"), ("localhost", "localhost")):
        openai = OpenAIProcess(host, 8003, "127.0.0.1:8001", 10)
        text = ready_text(serve_models({}), openai)
        assert text.endswith(f", OpenAI http://{shown}:8003/v1")


def test_a_taken_openai_port_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        done = flowprefill("serve", "--openai-port", str(port))
    assert done.returncode == 1
    assert f"error: port {port} on 127.0.0.1: address already in use" in done.stderr


def test_own_model_repository_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    beside_source = default_model_repository()
    (tmp_path / "model_repository").mkdir()
    assert default_model_repository().resolve() == tmp_path / "model_repository"
    assert beside_source != default_model_repository()


def test_unknown_model_is_one_line_and_exit_code_1() -> None:
    done = flowprefill("generate", "--model", "/nonexistent.gguf", "--prompt", "x")
    assert done.returncode == 1
    assert "error: " in done.stderr and "/nonexistent.gguf" in done.stderr
    assert "Traceback" not in done.stderr
