"""Peers as servers: how they are started, that they end, and what OpenVINO's endpoint says.

vLLM and OpenVINO are not installed here: a script stands for vLLM's interpreter, a function for
OpenVINO's pipeline.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowprefill.bench.peers.openvino_server import CompletionsServer, Token
from flowprefill.bench.peers.servers import (
    command_line,
    flags,
    sends_priority,
    serve_peer,
)
from flowprefill.bench.peers.spec import Conditions, PeerSpec
from flowprefill.bench.report import BenchmarkError
from flowprefill.replay.http_targets import OpenAITarget
from flowprefill.replay.plan import PlannedRequest
from flowprefill.replay.targets import Part
from flowprefill.workload import Objective
from tests.engine_harness import wait_until
from tests.stand_in_server import write_stand_in_server

CONDITIONS = Conditions(100, "bfloat16", num_threads=1, max_model_len=512)
PLANNED = PlannedRequest(0, 0.0, 3, 2, Objective("text", 1.0, 1.0))


def ask(url: str) -> list[Part]:
    async def main() -> list[Part]:
        target = OpenAITarget(url, "peer")
        try:
            return [part async for part in target.send(target.prepare(PLANNED, "a b c"))]
        finally:
            await target.close()

    return asyncio.run(main())


def test_openvino_s_endpoint_sends_an_event_for_each_token_and_then_the_counts() -> None:
    asked: list[tuple[str, int]] = []

    def submit(prompt: str, max_tokens: int) -> Iterator[Token]:
        asked.append((prompt, max_tokens))
        yield Token(" x", 3, is_last=False)
        yield Token("", 3, is_last=True)  # a token may have no text

    server = CompletionsServer(0, submit, "1.2")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        parts = ask(f"http://127.0.0.1:{server.server_port}")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert asked == [("a b c", 2)]
    assert [part.num_tokens for part in parts[:2]] == [1, 0]
    assert (parts[-1].num_input_tokens, parts[-1].total_tokens) == (3, 2)


def test_options_become_flags() -> None:
    options = {"max_num_seqs": 8, "disable_log_stats": True, "enable_prefix_caching": False}
    assert flags(options) == [
        "--max-num-seqs", "8", "--disable-log-stats", "--no-enable-prefix-caching",
    ]  # fmt: skip


def test_a_peer_is_started_under_our_conditions_and_with_its_options() -> None:
    vllm = PeerSpec("v", Path("/p"), Path("/m"), "vllm", {"max_num_batched_tokens": 512})
    command = " ".join(command_line(vllm, CONDITIONS, 8123))
    assert command.startswith("/p -I -m vllm.entrypoints.openai.api_server --model /m ")
    for flag in ("--port 8123", "--dtype bfloat16", "--max-model-len 512",
                 "--no-enable-prefix-caching", "--max-num-batched-tokens 512"):  # fmt: skip
        assert flag in command
    openvino = PeerSpec("o", Path("/p"), Path("/m"), "openvino", {"max_num_batched_tokens": 256})
    settings = json.loads(command_line(openvino, CONDITIONS, 8124)[-1])
    assert settings["options"] == {"max_num_batched_tokens": 256}
    assert (settings["port"], settings["num_threads"], settings["model"]) == (8124, 1, "/m")
    with pytest.raises(BenchmarkError, match="transformers has no server"):
        command_line(PeerSpec("t", Path("/p"), Path("/m"), "transformers"), CONDITIONS, 1)


@pytest.mark.parametrize(("policy", "expected"), [("priority", True), ("fcfs", False)])
def test_a_deadline_is_sent_to_whom_it_matters(policy: str, expected: bool) -> None:
    spec = PeerSpec("v", Path("/p"), Path("/m"), "vllm", {"scheduling_policy": policy})
    assert sends_priority(spec) is expected
    assert not sends_priority(PeerSpec("v", Path("/p"), Path("/m"), "vllm"))


def state(pid: int) -> str:
    """As in /proc, and X for one that is not there."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return "X"


def is_running(pid: int) -> bool:
    return state(pid) not in "ZX"


def test_a_peer_answers_inside_the_block_and_is_gone_behind_it(tmp_path: Path) -> None:
    spec = PeerSpec("v", write_stand_in_server(tmp_path), tmp_path, "vllm")
    with serve_peer(spec, CONDITIONS) as server:
        assert server.version == "vllm stand-in"
        assert ask(server.url)[-1].num_input_tokens == 3
        child = int((tmp_path / "child").read_text())
        assert is_running(child)
    wait_until(lambda: not is_running(child))


def test_a_stopped_peer_does_nothing_and_then_answers_again(tmp_path: Path) -> None:
    spec = PeerSpec("v", write_stand_in_server(tmp_path), tmp_path, "vllm")
    with serve_peer(spec, CONDITIONS) as server:
        pids = [server.process_group, int((tmp_path / "child").read_text())]
        with server.stopped():
            wait_until(lambda: [state(pid) for pid in pids] == ["T", "T"])
        assert ask(server.url)[-1].num_input_tokens == 3


def test_the_last_words_of_a_peer_that_does_not_start_are_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nraise SystemExit('no such model')\n")
    python.chmod(0o755)
    spec = PeerSpec("v", python, tmp_path, "vllm")
    with pytest.raises(BenchmarkError, match="no such model"), serve_peer(spec, CONDITIONS):
        pass
