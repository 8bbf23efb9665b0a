"""The load test, run as its users run it: against the real server, and how its own users behave."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flowprefill.server import TritonServer, free_ports
from tests.e2e.conftest import wait_for
from tests.e2e.locust_run import LocustRun, Meeting, grpc_stand_in, http_stand_in

CLASSES = ("chat", "search", "document")
NUM_USERS = {"Chat": 12, "Search": 8, "Document": 4}


def test_both_protocols_run_without_failures(server: TritonServer, tmp_path: Path) -> None:
    """At the same time, which spares time; with short documents and mild objectives.

    Until each class has answers in both, which takes a slow machine longer.
    """
    hosts = {"gRPC": server.grpc_url, "HTTP": f"http://{server.http_url}"}
    runs = {}
    for protocol, host in hosts.items():
        directory = tmp_path / protocol
        directory.mkdir()
        runs[protocol] = LocustRun(directory, host, "-u", "3", "-r", "3",
                                   "--prompt-scale", "0.3", "--slo-scale", "20")  # fmt: skip
    for run in runs.values():
        wait_for(partial(run.has_answers, CLASSES), 90, "an answer of each class")
    for protocol, run in runs.items():
        code, output = run.stop()
        assert code == 0, output
        assert run.table("failures") == []
        rows = {(row["Type"], row["Name"]) for row in run.table("stats")}
        # The last second of a run is in locust's printed table but not in its file.
        printed = re.findall(rf"^{protocol} +(.+?) +(\d+) +0\(", output, re.MULTILINE)
        counts = {name: int(count) for name, count in printed}
        slo = {row["Class"]: row for row in run.table("slo")}
        for name in CLASSES:
            assert {(protocol, f"{name}{kind}") for kind in ("", " TTFT", " TBT")} <= rows
            assert counts[f"{name} TTFT"] == counts[name] > 0
            assert counts[f"{name} TBT"] >= 7 * counts[name]  # answers have 8 tokens or more
            assert int(slo[name]["# Requests"]) == counts[name]
            percent = r" +[\d.]+%"
            row = rf"^ *{name} +{counts[name]} +0 +\d+{percent} +\d+{percent}{percent} +[\d.]+ *$"
            assert re.search(row, output, re.MULTILINE), output  # the closing table
        aggregated = sum(counts[name] for name in CLASSES)
        assert re.search(rf"^ +Aggregated +{aggregated} +0\(", output, re.MULTILINE), output


@pytest.mark.parametrize("stand_in", [grpc_stand_in, http_stand_in])
def test_users_run_concurrently_and_failures_keep_the_servers_words(
    stand_in: Any, tmp_path: Path
) -> None:
    """Users who wait, more than gevent's pool has threads, do not hold up others' answers."""
    num_users = str(sum(NUM_USERS.values()))
    meeting = Meeting(NUM_USERS["Chat"] + NUM_USERS["Document"], NUM_USERS["Search"])
    with stand_in(meeting) as host:
        run = LocustRun(tmp_path, host, "-u", num_users, "-r", num_users)
        try:
            wait_for(lambda: meeting.has_met, what="all users at once, and a refused one again")
        finally:
            code, output = run.stop()
            print(output)
    assert code == 1  # search was refused
    errors = re.findall(r"^\d+ +\S+ (.+?) *$", output.partition("Error report")[2], re.MULTILINE)
    assert set(errors) == {"search: ServerError('INVALID_ARG: slo_class: no such class')"}, output


def test_web_ui_shows_attainment_and_runs_a_burst(tmp_path: Path) -> None:
    (port,) = free_ports(1)

    def get(path: str, **form: object) -> str:
        data = urllib.parse.urlencode(form).encode() if form else None
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", data, timeout=10) as reply:
            return str(reply.read().decode())

    def spawned() -> list[str]:
        """What users there were, one load after another."""
        lines = json.loads(get("/logs"))["master"]
        return [line.partition("spawned: ")[2] for line in lines if "All users spawned: " in line]

    def page() -> str | None:
        with contextlib.suppress(OSError):
            return get("/")
        return None

    with http_stand_in(Meeting(0, -1)) as host:
        arguments = ("--class-picker", "--slo-scale", "100")
        run = LocustRun(tmp_path, host, *arguments, web_port=port)
        try:
            assert '"title": "SLO attainment"' in wait_for(page, what="the web UI answers")
            get("/swarm", user_count=9, spawn_rate=9, run_time="9s", shape_class="burst", host=host)
            wait_for(lambda: len(spawned()) == 3, what="a burst and its end")
            few = '{"Chat": 1, "Document": 1, "Search": 1} (3 total users)'
            many = '{"Chat": 7, "Document": 1, "Search": 1} (9 total users)'
            assert spawned() == [few, many, few]
            (tab,) = json.loads(get("/stats/requests"))["extended_stats"]
            rows = {row["name"]: row for row in tab["data"]}
            assert rows["chat"]["attainment"] == "100.0%"
            assert rows["search"]["attainment"] == "0.0%"  # each was refused
            assert int(rows["total"]["requests"]) >= 7
            assert get("/slo/csv").splitlines()[1].startswith("chat,")
        finally:
            code, output = run.stop()
    assert code == 1 and "SLO attainment" in output
