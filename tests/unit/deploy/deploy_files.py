"""What docker/ holds, read for tests: YAML documents, arguments of `serve`, documented metrics."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main
import yaml

from flowprefill.cli import app

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
KUBERNETES = DOCKER / "kubernetes"
DASHBOARD = DOCKER / "grafana" / "dashboards" / "flowprefill.json"
DOCKERFILE = (DOCKER / "Dockerfile").read_text()


class ComposeLoader(yaml.SafeLoader):
    """Knows `!reset`, with which a compose file takes back what the one under it says."""


ComposeLoader.add_constructor("!reset", lambda loader, node: None)


def read_yaml(path: Path) -> Any:
    return yaml.load(path.read_text(), ComposeLoader)


def read_manifests() -> list[dict[str, Any]]:
    """All Kubernetes objects, those of every folder."""
    paths = sorted(KUBERNETES.rglob("*.yaml"))
    documents = [doc for path in paths for doc in yaml.safe_load_all(path.read_text())]
    return [document for document in documents if document["kind"] != "Kustomization"]


def serve_options(arguments: list[str]) -> dict[str, Any]:
    """Values of all options of `flowprefill serve`; fails for one that it does not know."""
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return dict(serve.make_context("serve", list(arguments)).params)


def serve_ports(arguments: list[str]) -> set[int]:
    options = serve_options(arguments)
    return {options[f"{name}_port"] for name in ("http", "grpc", "metrics", "openai")} - {None}


def seconds(duration: str) -> float:
    """ "30s" or "10m"."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


@dataclass(frozen=True)
class Family:
    kind: str
    labels: frozenset[str]


def metric_families() -> dict[str, Family]:
    """Name -> what docs/metrics.md says of it."""
    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| ([^|]*)\|", page, re.MULTILINE)
    return {
        name: Family(kind, frozenset(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows
    }


def metrics_in(query: str) -> set[str]:
    """Names of our metrics in a PromQL expression, recorded ones not among them."""
    return set(re.findall(r"\b(?:flowprefill_|vllm:|nv_)\w+", query))


def family_of(metric: str, families: dict[str, Family]) -> Family:
    """The documented family of a series; fails if there is none."""
    if metric in families and families[metric].kind != "histogram":
        return families[metric]
    base = re.sub(r"_(bucket|sum|count)$", "", metric)
    assert base in families and families[base].kind == "histogram", f"{metric} is not documented"
    return Family("histogram", families[base].labels | {"le"})


def dashboard_queries(panels: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title of the panel, PromQL with Grafana's variables in it)."""
    return [
        (panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", [])
    ]


def without_variables(query: str, interval: str = "1m") -> str:
    """A panel's query as Grafana sends it with everything selected."""
    query = query.replace("$__rate_interval", interval)
    return re.sub(r"\$(model|instance|slo_class)\b", ".*", query)
