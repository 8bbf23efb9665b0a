"""`flowprefill timeline` against the real server, with requests of two classes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from flowprefill.server import TritonServer
from flowprefill.timeline import Timeline, gather, preempted
from flowprefill_client import Client, ServerError
from tests.e2e.conftest import MODEL, wait_for
from tests.unit.plots.test_chrome_trace import check_device_does_one_thing, check_valid

FLOWPREFILL = Path(sys.executable).parent / "flowprefill"
LONG_S = 50
"""Longer than the test; such a recording is ended."""


def send_chat_into_a_document(client: Client, name: str) -> None:
    """A short urgent request in the midst of a long patient one; both get their answers."""
    document = f"A report on {name}. " * 400
    sampling = {"temperature": 0, "ignore_eos": True}
    with client.stream(
        document, slo_class="document", request_id=f"document {name}", max_tokens=3,
        sampling=sampling,
    ) as stream:  # fmt: skip
        wait_for(lambda: client.engine_stats()["num_prefilling"], what="the prefill has begun")
        client.generate(
            f"Hello {name}", slo_class="chat", request_id=f"chat {name}", max_tokens=5,
            sampling=sampling,
        )  # fmt: skip
        assert list(stream)


def check(timeline: Timeline, name: str) -> None:
    """Raise AssertionError unless it has both requests and what the device did for them."""
    spans = {span.client_id: span for span in timeline.spans}
    document, chat = spans[f"document {name}"], spans[f"chat {name}"]
    assert (document.slo_class, document.outcome) == ("document", "finished")
    assert (chat.slo_class, chat.num_output_tokens, chat.outcome) == ("chat", 5, "finished")
    assert document.arrival_s < chat.arrival_s < chat.first_token_s < document.first_token_s
    prefills = [run for run in timeline.runs if run.task_id is not None]
    of_document = [run for run in prefills if run.req_ids == (document.req_id,)]
    assert [run.is_done for run in of_document] == [False] * (len(of_document) - 1) + [True]
    assert set(map(id, preempted(prefills))) & set(map(id, of_document))
    assert {group.name for run in of_document for group in run.slices} >= {"qkv", "mlp", "head"}
    assert len([run for run in timeline.runs if chat.req_id in run.req_ids]) >= 5
    for run in timeline.runs:
        assert timeline.from_s - 1 < run.start_s < run.end_s < timeline.to_s


def test_the_command_writes_a_page_and_a_trace_when_it_is_ended(
    server: TritonServer, client: Client, tmp_path: Path
) -> None:
    out = tmp_path / "new"
    command = [str(FLOWPREFILL), "timeline", "--url", server.grpc_url, "--model", MODEL,
               "--seconds", str(LONG_S), "--out", str(out)]  # fmt: skip
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr and "recording 50 s" in process.stderr.readline()
        send_chat_into_a_document(client, "otters")
        with pytest.raises(ServerError, match="one at a time"):
            next(client.record_timeline(1))
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert re.match(r"\d+\.\d s \(ended early: asked\): 2 requests, 2 with a first token", said)
    tracks = check_valid(json.loads((out / "timeline.json").read_text()))
    check_device_does_one_thing(tracks)
    page = (out / "timeline.html").read_text()
    assert "document otters" in page and "chat otters" in page
    assert client.end_timeline() is False


def test_a_recording_over_grpc_is_as_long_as_asked_for(client: Client) -> None:
    parts = client.record_timeline(LONG_S)
    first = next(parts)
    assert first["facts"]["policy"] == "goodput" and not first["runs"]
    send_chat_into_a_document(client, "badgers")
    assert client.end_timeline() is True
    check(gather([first, *parts]), "badgers")
    timeline = gather(list(client.record_timeline(0.2)))
    assert timeline.end == "time" and timeline.to_s - timeline.from_s >= 0.2
    assert timeline.runs == [] == timeline.spans


def test_a_recording_over_http_is_a_stream_of_events(server: TritonServer) -> None:
    body = json.dumps({"text_input": "", "record_timeline": 0.2}).encode()
    url = f"http://{server.http_url}/v2/models/{MODEL}/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=30) as answer:
        events = [line[6:] for line in answer if line.startswith(b"data: ")]
    parts = [json.loads(json.loads(event)["text_output"]) for event in events]
    assert len(parts) >= 2 and gather(parts).end == "time"
