"""The pods of every overlay: arguments, probes, names, images, grace periods."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from specdec.config import TargetSettings
from specdec.errors import ConfigError
from specdec.gateway_settings import GatewaySettings
from specdec.rpc.server import ALIVE
from specdec.settings import split_address
from tests.deploy.flows import Place, scraped
from tests.deploy.images import stages
from tests.deploy.manifests import (
    OVERLAYS,
    SERVICES,
    Pod,
    example,
    of_kind,
    overlay,
    own_pods,
    parse,
    pods,
    settings_of,
)
from tests.hygiene.sources import ROOT

DRAIN_REST_S = 10  # to write the last answers and send the last spans
WEIGHTS_S_MIN = 3600  # a probe waits so long for a model


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_service_is_started_with_settings_it_accepts(name: str, secrets: Path) -> None:
    """Claim: the command accepts arguments and variables of every container of ours, with TLS or --insecure; with TLS
    the gateway's HTTP port has TLS and keys too.
    Conclusive: the real parser and schema read them, and refuse any unknown word."""
    objects = overlay(name)
    found = {pod.service[0]: settings_of(pod, objects, secrets) for pod in own_pods(name) if pod.service}
    if name != "kuberay":
        assert found.keys() == set(SERVICES)
    for settings in found.values():
        assert settings is not None and settings.has_tls == (name == "mtls") and settings.insecure == (name != "mtls")
    if isinstance(gateway := found.get("gateway"), GatewaySettings):
        assert (gateway.api_keys_file is not None) == (gateway.http_ssl_certfile is not None) == (name == "mtls")


def test_an_unknown_flag_is_refused() -> None:
    """Claim: the check above can fail."""
    for arguments, environment in ((["--modle=m"], {}), (["--model=m"], {"SPECDEC_MODLE": "m"}), (["--port=x"], {})):
        with pytest.raises(ConfigError, match="not known|must be"):
            parse("draft", arguments, {"SPECDEC_MODEL": "m", **environment})


@pytest.mark.parametrize("name", OVERLAYS)
def test_ports_are_those_the_service_listens_on(name: str, secrets: Path) -> None:
    """Claim: the ports a container names are those of its settings; probes use existing ports, and by gRPC only the
    plain health port, which needs no TLS; by HTTP the gateway's health, over its port's own protocol, and its metrics,
    which need no coordinator. A container of a service has all three, so that a hung one is restarted."""
    objects = overlay(name)
    for pod in own_pods(name):
        for container in pod.spec["containers"]:
            named = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                for kind in ("grpc", "tcpSocket", "httpGet"):
                    if kind in container.get(probe, {}):
                        port = container[probe][kind]["port"]
                        assert port in named or port in named.values(), (pod.owner, probe)
                        assert kind != "grpc" or port == named["health"]
                        assert container[probe][kind].get("service", "") in ("", ALIVE)  # others are NOT_FOUND
        settings = settings_of(pod, objects, secrets)
        if settings is None or not named:
            continue
        assert settings.metrics_address and pod.service
        assert {"startupProbe", "readinessProbe", "livenessProbe"} <= pod.service[1].keys(), pod.owner
        if isinstance(settings, GatewaySettings):
            scheme = {} if settings.http_ssl_certfile is None else {"scheme": "HTTPS"}
            ready = {"httpGet": {"path": "/health", "port": "http"} | scheme}
            assert ready.items() <= pod.service[1]["readinessProbe"].items()
            for probe in ("startupProbe", "livenessProbe"):
                assert pod.service[1][probe]["httpGet"] == {"path": "/metrics", "port": "metrics"}
            assert named == {"http": settings.port, "metrics": split_address(settings.metrics_address)[1]}
            continue
        assert settings.health_address
        health, metrics = split_address(settings.health_address)[1], split_address(settings.metrics_address)[1]
        assert named == {"grpc": settings.port, "health": health, "metrics": metrics}, pod.owner


@pytest.mark.parametrize("name", OVERLAYS)
def test_models_are_waited_for(name: str) -> None:
    """Claim: a container that loads weights has an hour for it before it is restarted."""
    for pod in own_pods(name):
        if pod.service and pod.service[0] in ("draft", "target") and "ports" in pod.service[1]:
            probe = pod.service[1]["startupProbe"]
            assert probe["failureThreshold"] == 360
            assert probe["failureThreshold"] * probe["periodSeconds"] >= WEIGHTS_S_MIN


@pytest.mark.parametrize("name", OVERLAYS)
def test_a_pod_is_given_the_time_to_drain(name: str, secrets: Path) -> None:
    """Claim: the grace period covers the sleep before the stop, the drain, and a rest. Only what clients and balancers
    find by name sleeps: a target and a draft tell their coordinators by themselves that they stop."""
    objects = overlay(name)
    for pod in own_pods(name):
        settings = settings_of(pod, objects, secrets)
        if settings is not None and pod.service:
            sleeps = pod.service[0] in ("coordinator", "gateway")
            assert ("lifecycle" in pod.service[1]) == sleeps, pod.owner
            sleep_s = pod.service[1]["lifecycle"]["preStop"]["sleep"]["seconds"] if sleeps else 0
            needed_s = sleep_s + settings.drain_grace_s + DRAIN_REST_S
            assert pod.spec["terminationGracePeriodSeconds"] >= needed_s, pod.owner


@pytest.mark.parametrize("name", OVERLAYS)
def test_services_find_their_pods(name: str) -> None:
    """Claim: every Service's selector finds exactly one kind of pod, which has its ports; a headless one has the
    container's own numbers, since they are not translated."""
    objects = overlay(name)
    for service in of_kind(objects, "Service"):
        selector = {"matchLabels": service["spec"]["selector"]}
        found = [pod for pod in pods(objects) if Place.of(pod).matches(selector)]
        assert len(found) == 1, service["metadata"]["name"]
        named = {p["name"]: p["containerPort"] for c in found[0].spec["containers"] for p in c.get("ports", ())}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in named
            assert service["spec"].get("clusterIP") != "None" or port["port"] == named[port["targetPort"]]


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "kuberay"])
def test_what_is_scraped_is_found_ready_or_not(name: str) -> None:
    """Claim: each name that prometheus.yaml scrapes is a headless Service that lists the pods of its job's service at
    their metrics port, ready or not; no other Service lists pods that are not ready, for clients would be sent to them.

    Why: a coordinator without a target is not ready, and the alarms need its metrics just then.
    """
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay(name), "Service")}
    config = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yaml").read_text(encoding="utf-8"))
    found = {job["job_name"]: list(scraped({"scrape_configs": [job]})) for job in config["scrape_configs"]}
    assert found.keys() == {f"specdec-{component}" for component in SERVICES}
    for job, addresses in found.items():
        ((host, port),) = addresses
        spec = services.pop(host)
        assert spec["clusterIP"] == "None" and spec["publishNotReadyAddresses"] is True
        component = job.removeprefix("specdec-")
        assert spec["selector"] == {"app.kubernetes.io/name": "specdec", "app.kubernetes.io/component": component}
        assert spec["ports"] == [{"name": "metrics", "port": port, "targetPort": "metrics"}]
    assert services and not any("publishNotReadyAddresses" in spec for spec in services.values())


def test_a_secret_of_keys_is_made_as_it_is_mounted() -> None:
    """Claim: docs/operations.md makes the secret that the component `keys` mounts, with the file the gateway reads, by
    the command's own --new-key; with the component every gateway asks for keys.

    Conclusive: the page's words and the rendered pod are compared, neither is repeated here.
    """
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    ((namespace, name, file),) = re.findall(
        r"kubectl -n (\S+) create secret generic (\S*keys) --from-file=(\w+)=", page
    )
    (pod,) = [pod for pod in own_pods("mtls") if pod.service and pod.service[0] == "gateway"]
    (volume,) = [volume for volume in pod.spec["volumes"] if volume.get("secret", {}).get("secretName") == name]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod.spec["containers"][0]["volumeMounts"]}
    variables = {entry["name"]: entry.get("value") for entry in pod.spec["containers"][0]["env"]}
    assert pod.namespace == namespace and "specdec gateway --new-key" in page
    assert variables["SPECDEC_API_KEYS_FILE"] == f"{mounts[volume['name']]}/{file}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_owners_find_their_pods(name: str) -> None:
    """Claim: workloads and disruption budgets select existing pods, and each service has a budget that lets one pod go
    at a time; what an autoscaler scales exists and has no number of its own, all others of ours have one."""
    objects = overlay(name)
    for owner in of_kind(objects, "Deployment", "StatefulSet"):
        labels = owner["spec"]["template"]["metadata"]["labels"]
        assert Place("", "", tuple(labels.items())).matches(owner["spec"]["selector"])
    budgeted = []
    for budget in of_kind(objects, "PodDisruptionBudget"):
        found = [pod for pod in pods(objects) if Place.of(pod).matches(budget["spec"]["selector"])]
        assert len(found) == 1 and budget["spec"]["maxUnavailable"] == 1, budget["metadata"]["name"]
        budgeted += [pod.service[0] for pod in found if pod.service]
    assert sorted(budgeted) == ([] if name == "kuberay" else sorted(SERVICES))
    scaled = [one["spec"]["scaleTargetRef"] for one in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")]
    wanted = {(reference["kind"], reference["name"]) for reference in scaled}
    owners = {
        (owner["kind"], owner["metadata"]["name"]): owner["spec"]
        for owner in of_kind(objects, "Deployment", "StatefulSet", "LeaderWorkerSet")
        if owner["metadata"]["name"].startswith("specdec-")
    }
    assert len(scaled) == len(wanted) == (3 if name == "autoscaling" else 0) and wanted <= owners.keys()
    assert {owner for owner, spec in owners.items() if "replicas" not in spec} == wanted


def test_targets_and_drafts_are_scaled_by_their_load() -> None:
    """Claim: of targets and of drafts the sum of the load that they report, at most 0.7 of each, decides the number,
    and at most one leaves in ten minutes; of coordinators their CPU, at 60 % of what is requested.

    Conclusive: the query's label is compared with the service that is scaled; `test_running` reads its series from the
    pages of running services.
    """
    objects = overlay("autoscaling")
    for scaler in of_kind(objects, "ScaledObject"):
        service = scaler["spec"]["scaleTargetRef"]["name"].removeprefix("specdec-")
        (trigger,) = scaler["spec"]["triggers"]
        assert trigger["type"] == "prometheus" and trigger["metricType"] == "AverageValue"
        assert trigger["metadata"]["query"] == f'sum(specdec_load{{replica="{service}"}})'
        assert trigger["metadata"]["threshold"] == "0.7" and trigger["metadata"]["ignoreNullValues"] == "false"
        down = scaler["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
        assert down["policies"] == [{"type": "Pods", "value": 1, "periodSeconds": 600}]
    (scaler,) = of_kind(objects, "HorizontalPodAutoscaler")
    (metric,) = scaler["spec"]["metrics"]
    target = {"type": "Utilization", "averageUtilization": 60}
    assert metric == {"type": "Resource", "resource": {"name": "cpu", "target": target}}


def test_a_group_of_nodes_is_scaled_as_the_component_says(tmp_path: Path) -> None:
    """Claim: with the lines of components/autoscaling it scales targets of several nodes: the LeaderWorkerSet, which
    then has no number of its own. Conclusive: the file's own lines are rendered."""
    objects = example("autoscaling/target.yaml", tmp_path)
    scaled = {one["spec"]["scaleTargetRef"]["kind"] for one in of_kind(objects, "ScaledObject")}
    (ranks,) = of_kind(objects, "LeaderWorkerSet")
    assert scaled == {"LeaderWorkerSet", "Deployment"} and "replicas" not in ranks["spec"]
    (reference,) = [
        one["spec"]["scaleTargetRef"]
        for one in of_kind(objects, "ScaledObject")
        if one["metadata"]["name"] == "specdec-target"
    ]
    assert (reference["apiVersion"], reference["name"]) == (ranks["apiVersion"], ranks["metadata"]["name"])


def test_images_are_those_of_the_dockerfile() -> None:
    """Claim: in all overlays every container of ours has the image of its service, one version throughout, and each
    image is a stage of the Dockerfile."""
    images = {c["image"] for name in OVERLAYS for pod in pods(overlay(name)) for c in pod.containers}
    own = {image for image in images if image.startswith("specdec-")}
    assert len({image.rpartition(":")[2] for image in own}) == 1
    assert {image.rpartition(":")[0].removeprefix("specdec-") for image in own} <= stages().keys()
    assert all(re.search(r":v?\d", image) for image in images), "every image has a version"
    for name in OVERLAYS:
        for pod in own_pods(name):
            component = pod.labels["app.kubernetes.io/component"].removesuffix("-ranks")
            if pod.service:
                assert pod.service[0] == component == pod.service[1]["name"]


def test_ranks_of_a_group_fit_together(secrets: Path) -> None:
    """Claim: the pods of the multi-node target are one target: the same settings but for the node's number, as many as
    the set's size, and one GPU for each rank of a node."""
    objects = overlay("multi-node")
    ranks: list[tuple[TargetSettings, Pod]] = []
    for pod in pods(objects):
        own = settings_of(pod, objects, secrets)
        if isinstance(own, TargetSettings):
            ranks.append((own, pod))
    assert [settings.node_rank for settings, _ in ranks] == list(range(ranks[0][0].nnodes))
    assert len({settings.model_copy(update={"node_rank": 0}).model_dump_json() for settings, _ in ranks}) == 1
    for settings, pod in ranks:
        gpus = int(pod.spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
        assert gpus * settings.nnodes == settings.tensor_parallel_size
        shm = [volume for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        assert shm[0]["emptyDir"]["medium"] == "Memory"
    assert not of_kind(objects, "StatefulSet")


def fetch_script() -> str:
    """The script of the job that fetches models."""
    (job,) = of_kind(overlay("gpu"), "Job")
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:2] == ["/bin/sh", "-ceu"]
    return container["command"][2]


def test_the_hubs_command_has_the_flags_of_the_job() -> None:
    """Claim: the hub's command has the flags that the job passes, and they name all files a model needs."""
    if shutil.which("hf") is None:
        pytest.skip("the hub's command is not installed")
    helped = subprocess.run(["hf", "download", "--help"], capture_output=True, text=True, timeout=60).stdout
    flags = set(re.findall(r"(?<!\S)--[a-z-]+", fetch_script()))
    assert flags == {"--revision", "--local-dir", "--include"}
    assert all(flag in helped for flag in flags)
    from specdec.engine.loading.folder_files import HUB_FILES

    assert set(re.findall(r'--include "?([^\s"]+)', fetch_script())) == set(HUB_FILES)


def test_a_folder_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    """Claim: the job gives a folder its name only after the whole download, goes on after an interrupted one, and does
    not fetch a complete one again. Conclusive: its own script runs, with a download that stops in the middle once."""
    tools, models = tmp_path / "bin", tmp_path / "models"
    tools.mkdir()
    (tools / "hf").write_text(
        '#!/bin/sh\nwhile [ "$1" != --local-dir ]; do shift; done\nmkdir -p "$2"\necho "$2" >> "$LOG"\n'
        'echo {} > "$2/config.json"\n[ -f "$FAIL" ] && rm "$FAIL" && exit 1\necho w > "$2/model.safetensors"\n'
    )
    (tools / "hf").chmod(0o755)
    names = {"TARGET_ID": "a/big", "TARGET_REVISION": "main", "DRAFT_ID": "a/small", "DRAFT_REVISION": "v1"}
    own = {"LOG": str(tmp_path / "log"), "FAIL": str(tmp_path / "fail"), "PATH": f"{tools}:{os.environ['PATH']}"}
    (tmp_path / "fail").touch()
    script = fetch_script().replace("/models/", f"{models}/")

    def run() -> int:
        return subprocess.run(["/bin/sh", "-ceu", script], env={**names, **own}, timeout=30).returncode

    assert run() == 1 and not (models / "a" / "big" / "main").exists()
    assert run() == 0 and run() == 0
    assert (models / "a/big/main/model.safetensors").is_file() and (models / "a/small/v1/model.safetensors").is_file()
    assert len((tmp_path / "log").read_text().splitlines()) == 3
