"""A real Prometheus asks a real server: every query of the dashboard has data after some load."""

from __future__ import annotations

import json
import math
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flowprefill.server import TritonServer, free_ports
from flowprefill_client import Client, ServerError
from tests.e2e.conftest import wait_for
from tests.system_tools import system_tool
from tests.unit.deploy.deploy_files import (
    DASHBOARD,
    DOCKER,
    dashboard_queries,
    without_variables,
)

WINDOW = "5m"
"""For rates: longer than the test, however slow the machine."""
DOCUMENT = "All work and no play makes Jack a dull boy. " * 80  # about 960 tokens


class Prometheus:
    """A running Prometheus with docker/prometheus, its target and its intervals exchanged."""

    def __init__(self, directory: Path, target: str) -> None:
        config = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "500ms", "evaluation_interval": "500ms"}
        config["rule_files"] = [str(DOCKER / "prometheus" / "rules.yml")]
        job = next(j for j in config["scrape_configs"] if j["job_name"] == "flowprefill")
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": [target]}]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        [port] = free_ports(1)
        self._url = f"http://127.0.0.1:{port}/api/v1"
        self.log_path = directory / "prometheus.log"
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [system_tool("prometheus", "prometheus"),
                 f"--config.file={directory / 'prometheus.yml'}",
                 f"--storage.tsdb.path={directory / 'data'}",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def ask(self, path: str, **parameters: str) -> Any:
        """`data` of an answer; None while it does not answer yet."""
        assert self.process.poll() is None, self.log_path.read_text()
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it has not read its storage
                return None
            pytest.fail(f"{url}: {error.read().decode()}")
        except urllib.error.URLError:
            return None

    def values(self, query: str) -> list[float]:
        """Values of a query now, NaN left out."""
        data = self.ask("query", query=query) or {"result": []}
        values = [float(sample["value"][1]) for sample in data["result"]]
        return [value for value in values if not math.isnan(value)]


@pytest.fixture(scope="module")
def prometheus(
    server: TritonServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    target = server.metrics_url.removeprefix("http://").removesuffix("/metrics")
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), target)
    try:
        wait_for(lambda: running.values('up{job="flowprefill"} == 1'), what="a first scrape")
        yield running
    finally:
        running.process.terminate()
        running.process.wait(20)


def make_load(client: Client) -> None:
    """Documents, each left for a chat message in the middle; one client leaves, one is refused."""
    for number in range(2):
        with client.stream(f"{number}. {DOCUMENT}", max_tokens=8, slo_class="document") as document:
            wait_for(lambda: client.engine_stats()["num_prefilling"], what="a prefill")
            client.generate(f"Hello, {number}", max_tokens=8, slo_class="chat")
            for _ in document:
                pass
    with client.stream("Once upon a time", max_tokens=2000, slo_class="chat") as left:
        next(left)
    with pytest.raises(ServerError, match="top_p"):
        client.generate("Hello", sampling={"top_p": 7})


def test_every_panel_has_data_after_a_short_load(prometheus: Prometheus, client: Client) -> None:
    queries = dashboard_queries(json.loads(DASHBOARD.read_text())["panels"])
    make_load(client)
    answers: dict[tuple[str, str], list[float]] = {}

    def all_answered() -> bool:
        for panel, query in queries:
            found = prometheus.values(without_variables(query, WINDOW))
            answers[panel, query] = found or answers.get((panel, query), [])
        return all(answers.values())

    try:
        wait_for(all_answered)
    finally:
        print("without data:", [key for key, values in answers.items() if not values])

    def of(panel: str) -> list[float]:
        return [
            value for (title, _), values in answers.items() if title == panel for value in values
        ]

    assert len(of("SLO attainment")) >= 2 and all(0 <= value <= 1 for value in of("SLO attainment"))
    assert max(of("Preemptions and evictions")) > 0
    assert 0 < max(of("TTFT percentiles")) < 60 and 0 < max(of("Blocking")) < 1
    assert max(of("Ends of requests")) > 0


def test_the_rules_are_evaluated_without_a_fault(prometheus: Prometheus, client: Client) -> None:
    client.generate("Hello", max_tokens=2, slo_class="chat")
    wait_for(lambda: prometheus.values('flowprefill:goodput:rate5m{slo_class="chat"}'))
    groups = prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == 9
    assert {rule["name"]: rule.get("lastError") for rule in rules} == dict.fromkeys(
        rule["name"] for rule in rules
    )
