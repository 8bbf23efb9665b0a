"""The compose files, and the Dockerfile, hold together."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from flowprefill.openai.process import _END_GRACE_S
from flowprefill.server import _KILL_GRACE_S, UNLOAD_TIMEOUT_S
from tests.unit.deploy.deploy_files import (
    DASHBOARD,
    DOCKER,
    DOCKERFILE,
    read_yaml,
    seconds,
    serve_options,
    serve_ports,
)

COMPOSE = read_yaml(DOCKER / "compose.yaml")["services"]
CLUSTER = read_yaml(DOCKER / "compose.cluster.yaml")["services"]


def container_ports(service: dict[str, Any]) -> set[int]:
    return {int(port.rsplit(":", 1)[1]) for port in service["ports"]}


def mounts(service: dict[str, Any]) -> dict[str, Path]:
    """Path in the container -> path here, of mounted files and folders."""
    pairs = (volume.split(":")[:2] for volume in service.get("volumes", []))
    return {target: (DOCKER / source).resolve() for source, target in pairs if source[0] == "."}


def test_the_image_starts_serve_with_options_that_it_has() -> None:
    entrypoint = re.search(r"^ENTRYPOINT (.*)", DOCKERFILE, re.MULTILINE)
    assert entrypoint
    program, command, *arguments = json.loads(entrypoint.group(1))
    assert (program, command) == ("flowprefill", "serve")
    arguments += COMPOSE["server"]["command"]
    assert serve_options(arguments)["host"] == "0.0.0.0"
    exposed = re.search(r"^EXPOSE (.*)", DOCKERFILE, re.MULTILINE)
    assert exposed and {int(port) for port in exposed.group(1).split()} == serve_ports(arguments)
    assert container_ports(COMPOSE["server"]) == serve_ports(arguments)


def test_the_server_has_time_to_drain_before_it_is_killed() -> None:
    exit_timeout_s = serve_options(COMPOSE["server"]["command"])["exit_timeout_s"]
    grace_s = seconds(COMPOSE["server"]["stop_grace_period"])
    assert grace_s > exit_timeout_s + UNLOAD_TIMEOUT_S + _KILL_GRACE_S + _END_GRACE_S


def test_the_cache_is_a_volume_where_the_image_has_it() -> None:
    cache = re.search(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)
    assert cache and f"cache:{cache.group(1)}" in COMPOSE["server"]["volumes"]


@pytest.mark.parametrize("services", [COMPOSE, CLUSTER], ids=["one server", "cluster"])
def test_everything_mounted_exists(services: dict[str, Any]) -> None:
    paths = [path for service in services.values() for path in mounts(service).values()]
    assert paths and all(path.exists() for path in paths)


@pytest.mark.parametrize("services", [COMPOSE, CLUSTER], ids=["one server", "cluster"])
def test_ports_are_open_to_this_machine_only(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports") or []]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("services", [COMPOSE, CLUSTER], ids=["one server", "cluster"])
def test_what_ends_is_started_again(services: dict[str, Any]) -> None:
    lasting = [s for s in services.values() if "image" in s and "profiles" not in s]
    assert lasting
    assert {service.get("restart") for service in lasting} == {"unless-stopped"}


def test_nobody_can_log_in_at_grafana_whose_password_everybody_knows() -> None:
    environment = COMPOSE["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert "GF_AUTH_ANONYMOUS_ORG_ROLE" not in environment  # Viewer
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"


def test_prometheus_asks_all_servers_on_their_metrics_port() -> None:
    config = read_yaml(mounts(COMPOSE["prometheus"])["/etc/prometheus"] / "prometheus.yml")
    jobs = {job["job_name"]: job["dns_sd_configs"][0] for job in config["scrape_configs"]}
    servers = jobs["flowprefill"]
    assert servers["names"] == COMPOSE["server"]["networks"]["default"]["aliases"]
    assert servers["port"] == serve_options(COMPOSE["server"]["command"])["metrics_port"]
    assert jobs["haproxy"]["names"] == [name for name in CLUSTER if name == "haproxy"]
    assert jobs["haproxy"]["port"] in container_ports(CLUSTER["haproxy"])


def test_grafana_finds_its_data_source_and_its_dashboard() -> None:
    grafana = mounts(COMPOSE["grafana"])
    provisioning = grafana["/etc/grafana/provisioning"]
    source = read_yaml(provisioning / "datasources" / "prometheus.yaml")["datasources"][0]
    host, port = re.fullmatch(r"http://(\w+):(\d+)", source["url"]).groups()  # type: ignore[union-attr]
    assert int(port) in container_ports(COMPOSE[host])
    provider = read_yaml(provisioning / "dashboards" / "flowprefill.yaml")["providers"][0]
    folder = provider["options"]["path"]
    assert grafana[folder] / DASHBOARD.name == DASHBOARD
    home = COMPOSE["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/{DASHBOARD.name}"


def test_haproxy_knows_the_servers_of_the_cluster_and_their_ports() -> None:
    config = (DOCKER / "haproxy" / "haproxy.cfg").read_text()
    wanted = set(re.findall(r"\$\{(SERVER_\d)\}", config))
    environment = CLUSTER["haproxy"]["environment"]
    servers = {name: value for name, value in environment.items() if name.startswith("SERVER")}
    assert set(servers) == wanted
    assert set(servers.values()) == {name for name in CLUSTER if name.startswith("server")}
    assert set(servers.values()) <= set(CLUSTER["haproxy"]["depends_on"])

    options = serve_options(COMPOSE["server"]["command"])
    defaults = dict(re.findall(r"\$\{(GRPC|HTTP|OPENAI)_PORT-(\d+)\}", config))
    assert {name: int(port) for name, port in defaults.items()} == {
        name: options[f"{name.lower()}_port"] for name in ("GRPC", "HTTP", "OPENAI")
    }
    binds = {int(port) for port in re.findall(r"_BIND-[\d.]*:(\d+)\}", config)}
    assert container_ports(CLUSTER["haproxy"]) == binds
    # Whatever listens on a container's own 127.0.0.1 is reached by nobody outside of it.
    assert environment["ADMIN_BIND"].startswith(":")


def test_the_image_s_context_holds_what_is_copied_and_no_more() -> None:
    lines = (DOCKER.parent / ".dockerignore").read_text().split("\n")
    assert lines[1] == "*"
    kept = {line[1:] for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert {source.split("/")[0] for line in copies for source in line.split()} == kept
