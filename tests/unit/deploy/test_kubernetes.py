"""The Kubernetes manifests agree with each other, with the image and with `serve`."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import yaml

from flowprefill.openai.process import _END_GRACE_S
from flowprefill.server import _KILL_GRACE_S, UNLOAD_TIMEOUT_S
from tests.unit.deploy.deploy_files import (
    DOCKER,
    DOCKERFILE,
    KUBERNETES,
    ROOT,
    family_of,
    metric_families,
    read_manifests,
    serve_options,
    serve_ports,
)


def objects(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in read_manifests() if manifest["kind"] == kind]


def named(kind: str, name: str) -> dict[str, Any]:
    found = [manifest for manifest in objects(kind) if manifest["metadata"]["name"] == name]
    assert len(found) == 1, f"{len(found)} {kind} {name}"
    return found[0]


def container(deployment: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(deployment)["spec"]["containers"][0]
    return found


def pod(deployment: str) -> dict[str, Any]:
    template: dict[str, Any] = named("Deployment", deployment)["spec"]["template"]
    return template


def port_numbers(deployment: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container(deployment)["ports"]}


def test_every_file_is_in_the_kustomization_of_its_folder() -> None:
    folders = [path.parent for path in KUBERNETES.rglob("kustomization.yaml")]
    assert {folder.name for folder in folders} == {
        "kubernetes", "monitoring", "autoscaling", "gateway",
    }  # fmt: skip
    for folder in folders:
        listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert set(listed) == files


def test_selectors_select_the_servers() -> None:
    labels = pod("flowprefill")["metadata"]["labels"]
    selectors = [
        named("Deployment", "flowprefill")["spec"]["selector"]["matchLabels"],
        named("PodDisruptionBudget", "flowprefill")["spec"]["selector"]["matchLabels"],
        named("PodMonitor", "flowprefill")["spec"]["selector"]["matchLabels"],
        named("InferencePool", "flowprefill")["spec"]["selector"]["matchLabels"],
        named("Service", "flowprefill")["spec"]["selector"],
        named("Service", "flowprefill-grpc")["spec"]["selector"],
    ]
    assert all(selector == labels for selector in selectors)
    # Not those of the picker, which is nobody's server.
    assert pod("flowprefill-epp")["metadata"]["labels"] != labels


def test_ports_are_those_of_serve_by_the_same_names() -> None:
    arguments = container("flowprefill")["args"]
    ports = port_numbers("flowprefill")
    options = serve_options(arguments)
    assert set(ports.values()) == serve_ports(arguments)
    assert ports == {name: options[f"{name}_port"] for name in ports}


def test_services_and_monitor_lead_to_ports_of_the_container() -> None:
    for service in objects("Service"):
        ports = port_numbers(service["spec"]["selector"]["app"])
        assert all(port["port"] == ports[port["targetPort"]] for port in service["spec"]["ports"])
    endpoints = named("PodMonitor", "flowprefill")["spec"]["podMetricsEndpoints"]
    assert [endpoint["port"] for endpoint in endpoints] == ["metrics"]


def test_probes_ask_what_is_last_to_be_ready_and_allow_for_the_load() -> None:
    spec = container("flowprefill")
    probes = {name: spec[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["httpGet"] for name, probe in probes.items()} == {
        "startup": {"path": "/health", "port": "openai"},
        "readiness": {"path": "/health", "port": "openai"},
        "liveness": {"path": "/v2/health/live", "port": "http"},
    }
    startup_s = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
    assert startup_s >= serve_options(spec["args"])["load_timeout_s"]


def test_a_pod_has_time_to_leave_its_services_and_to_drain() -> None:
    spec = container("flowprefill")
    sleep_s = int(spec["lifecycle"]["preStop"]["exec"]["command"][1])
    exit_timeout_s = serve_options(spec["args"])["exit_timeout_s"]
    grace_s = pod("flowprefill")["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > sleep_s + exit_timeout_s + UNLOAD_TIMEOUT_S + _KILL_GRACE_S + _END_GRACE_S
    readiness = spec["readinessProbe"]
    assert sleep_s > readiness["periodSeconds"] * readiness["failureThreshold"]
    assert pod("flowprefill-epp")["spec"]["terminationGracePeriodSeconds"] >= grace_s


def test_the_image_can_run_as_the_manifests_want_it() -> None:
    # runAsNonRoot is checked against the image's number; a name would be refused.
    assert pod("flowprefill")["spec"]["securityContext"]["runAsNonRoot"] is True
    user = re.search(r"^USER (\S+)", DOCKERFILE, re.MULTILINE)
    assert user and int(user.group(1)) > 0
    assert pod("flowprefill")["spec"]["securityContext"]["fsGroup"] == int(user.group(1))
    mounted = {mount["mountPath"] for mount in container("flowprefill")["volumeMounts"]}
    cache = re.search(r"XDG_CACHE_HOME=(\S+)", DOCKERFILE)
    assert cache and mounted == {"/dev/shm", cache.group(1)}
    volumes = {volume["name"] for volume in pod("flowprefill")["spec"]["volumes"]}
    assert {mount["name"] for mount in container("flowprefill")["volumeMounts"]} == volumes


def test_the_autoscaler_scales_the_deployment() -> None:
    spec = named("ScaledObject", "flowprefill")["spec"]
    assert spec["scaleTargetRef"] == {"name": "flowprefill"}
    # With a number of its own, each `apply` would undo what the autoscaler did.
    assert "replicas" not in named("Deployment", "flowprefill")["spec"]
    assert spec["minReplicaCount"] >= 2
    load, lateness = (trigger["metadata"] for trigger in spec["triggers"])
    assert load["ignoreNullValues"] == "false"
    assert "or vector(0)" in lateness["query"]  # no traffic is not late


def test_servers_are_spread_over_nodes() -> None:
    [spread] = pod("flowprefill")["spec"]["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == pod("flowprefill")["metadata"]["labels"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"


def test_the_documented_command_makes_a_rule_object_of_the_rules() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    [command] = re.findall(
        r"^(\{ printf .*?) \| kubectl apply -f -$", page, re.MULTILINE | re.DOTALL
    )
    made = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, check=True).stdout
    rule = yaml.safe_load(made)
    assert rule["kind"] == "PrometheusRule"
    rules = (DOCKER / "prometheus" / "rules.yml").read_text()
    assert rule["spec"] == yaml.safe_load(rules)


def test_the_gateway_leads_through_the_picker_to_the_openai_port() -> None:
    pool = named("InferencePool", "flowprefill")["spec"]
    assert pool["targetPorts"] == [{"number": port_numbers("flowprefill")["openai"]}]
    picker = pool["endpointPickerRef"]
    ports = [port["port"] for port in named("Service", picker["name"])["spec"]["ports"]]
    assert ports == [picker["port"]["number"]]
    [backend] = named("HTTPRoute", "flowprefill")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "flowprefill")
    for objective in objects("InferenceObjective"):
        assert objective["spec"]["poolRef"] == {"name": "flowprefill"}


def test_the_picker_reads_documented_gauges_on_the_metrics_port() -> None:
    arguments = container("flowprefill-epp")["args"]
    flags = dict(argument.removeprefix("--").split("=", 1) for argument in arguments)
    assert flags["pool-name"] == "flowprefill"
    assert int(flags["model-server-metrics-port"]) == port_numbers("flowprefill")["metrics"]
    families = metric_families()
    for flag in ("total-queued-requests-metric", "kv-cache-usage-percentage-metric"):
        assert family_of(flags[flag], families).kind == "gauge"
    folder, file = flags["config-file"].rsplit("/", 1)
    assert container("flowprefill-epp")["volumeMounts"] == [{"name": "config", "mountPath": folder}]
    assert file in named("ConfigMap", "flowprefill-epp")["data"]


def test_the_picker_may_do_what_its_account_is_bound_to() -> None:
    account = pod("flowprefill-epp")["spec"]["serviceAccountName"]
    assert named("ServiceAccount", account)
    [binding] = objects("RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    role = named("Role", binding["roleRef"]["name"])
    readable = {resource for rule in role["rules"] for resource in rule["resources"]}
    assert readable == {"pods", "inferencepools", "inferenceobjectives"}
