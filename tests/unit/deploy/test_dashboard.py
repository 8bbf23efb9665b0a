"""Dashboard, rules and autoscaling ask only for metrics that docs/metrics.md defines."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.system_tools import system_tool
from tests.unit.deploy.deploy_files import (
    DASHBOARD,
    DOCKER,
    dashboard_queries,
    family_of,
    metric_families,
    metrics_in,
    read_manifests,
    read_yaml,
    without_variables,
)

PROMETHEUS = DOCKER / "prometheus"
TARGET_LABELS = {"model", "version", "instance", "job", "pod"}
PANELS: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]


def all_queries() -> list[str]:
    rules = [
        rule for group in read_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]
    ]
    triggers = [
        trigger
        for manifest in read_manifests()
        if manifest["kind"] == "ScaledObject"
        for trigger in manifest["spec"]["triggers"]
    ]
    return [
        *(without_variables(query) for _, query in dashboard_queries(PANELS)),
        *(rule["expr"] for rule in rules),
        *(trigger["metadata"]["query"] for trigger in triggers),
    ]


def test_every_metric_is_documented() -> None:
    families = metric_families()
    asked = set().union(*(metrics_in(query) for query in all_queries()))
    assert len(asked) > 20
    for metric in asked:
        family_of(metric, families)


def test_every_label_in_a_selector_is_one_of_the_family() -> None:
    families = metric_families()
    selectors = [
        selector
        for query in all_queries()
        for selector in re.findall(r"((?:flowprefill_|vllm:)\w+)\{([^}]*)\}", query)
    ]
    assert len(selectors) > 20
    for metric, matchers in selectors:
        labels = set(re.findall(r"(\w+)\s*[=!]", matchers))
        assert labels <= family_of(metric, families).labels | TARGET_LABELS, metric


def test_the_dashboard_shows_what_it_is_for() -> None:
    asked = set().union(*(metrics_in(query) for _, query in dashboard_queries(PANELS)))
    assert {
        "flowprefill_requests_on_time_total",
        "flowprefill_time_to_first_token_seconds_bucket",
        "flowprefill_preemptions_total",
        "flowprefill_blocking_seconds_bucket",
        "vllm:kv_cache_usage_perc",
        "vllm:num_requests_waiting",
    } <= asked
    kinds = {panel["title"]: panel["type"] for panel in PANELS}
    assert kinds["TTFT"] == "heatmap"


def test_panels_do_not_overlap() -> None:
    cells = [
        (x, y)
        for panel in PANELS
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24


def promtool(*arguments: str | Path) -> None:
    command = [system_tool("promtool", "prometheus"), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_configuration_of_prometheus_is_valid() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


def test_the_rules_record_and_alert_as_their_examples_say() -> None:
    promtool("test", "rules", PROMETHEUS / "rules.test.yml")


def test_every_query_is_valid_promql(tmp_path: Path) -> None:
    rules = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(all_queries())]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", path)


def test_variables_of_the_queries_are_those_of_the_dashboard() -> None:
    names = {item["name"] for item in json.loads(DASHBOARD.read_text())["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(query for _, query in dashboard_queries(PANELS))))
    assert used - {"__rate_interval"} == names - {"datasource"}
