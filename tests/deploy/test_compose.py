"""The compose file: valid by the specification's schema, and consistent with the Dockerfile, the commands and the
monitoring it names. Nothing is started by Docker here; `test_running` starts its commands as plain processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from specdec.config import CoordinatorSettings
from specdec.gateway_settings import GatewaySettings
from specdec.settings import split_address
from tests.deploy.compose import FILE, OWN, compose, role_of
from tests.deploy.flows import scraped
from tests.deploy.images import DOCKERFILE, IMAGE_ROOT, stages
from tests.deploy.manifests import overlay, parse, pods
from tests.hygiene.sources import ROOT

DRAIN_REST_S = 10


def schema_problems(content: object) -> list[str]:
    """The errors of a file by the schema of the compose specification."""
    package = pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    found = list((Path(package.__file__).parent / "builtin_schemas").rglob("compose-spec.json"))
    if not found:
        pytest.skip("check-jsonschema comes without the compose specification")
    schema = json.loads(found[0].read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.validators.validator_for(schema)(schema).iter_errors(content)]


def test_it_fits_the_specification() -> None:
    """Claim: the file fits the schema of the compose specification, which refuses unknown keys of a service."""
    content = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    assert schema_problems(content) == []
    broken = {**content, "services": {"a": {"image": "b", "comand": []}}}
    assert schema_problems(broken)


def test_everything_comes_up_with_one_command() -> None:
    """Claim: the file has the three services and the gateway, Jaeger 2, Prometheus and Grafana, each on an existing
    network, and only loopback reaches them from outside."""
    services = compose()["services"]
    assert services.keys() == {*OWN, "jaeger", "prometheus", "grafana"}
    assert services["jaeger"]["image"].startswith("jaegertracing/jaeger:2.")
    for name, service in services.items():
        assert set(service["networks"]) <= compose()["networks"].keys(), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


@pytest.mark.parametrize("name", OWN)
def test_a_service_is_built_and_started_as_it_can_be(name: str) -> None:
    """Claim: the build is a stage of the Dockerfile, the image the one of the manifests, the command accepted by the
    real parser, the grace longer than the drain, the models those the image copies; nothing may be written but /tmp."""
    service = compose()["services"][name]
    build = service["build"]
    assert (FILE.parent / build["context"] / build["dockerfile"]).samefile(DOCKERFILE)
    assert build["target"] == role_of(name) in stages()
    assert service["image"] in {c["image"] for pod in pods(overlay("cpu-demo")) for c in pod.containers}
    settings = parse(role_of(name), service["command"], {})
    assert float(service["stop_grace_period"].removesuffix("s")) >= settings.drain_grace_s + DRAIN_REST_S
    is_gateway = isinstance(settings, GatewaySettings)
    asked = f"http://127.0.0.1:{settings.port}/health" if is_gateway else settings.health_address
    assert asked and f'"{asked}"' in " ".join(service["healthcheck"]["test"])
    assert service["read_only"] and service["tmpfs"] == ["/tmp"] and service["cap_drop"] == ["ALL"]
    model = settings.tokenizer if isinstance(settings, CoordinatorSettings) else settings.model
    stage, embedded = stages()[role_of(name)], f"{IMAGE_ROOT}/specdec/embedded"
    assert stage.holds(model)
    assert not any(stage.holds(f"{embedded}/{unused}") for unused in ("smollm2-draft", "smollm2-head"))


def test_addresses_are_those_of_services() -> None:
    """Claim: every address of a command is a service of this file, at a port it listens on; Prometheus scrapes the
    metrics of all four."""
    services = compose()["services"]
    settings = {name: parse(role_of(name), services[name]["command"], {}) for name in OWN}
    coordinator = settings["specdec-coordinator"]
    assert isinstance(coordinator, CoordinatorSettings) and coordinator.draft
    for address in (*coordinator.target, *coordinator.draft):
        host, port = split_address(address)
        assert settings[host].port == port
    gateway = settings["specdec-gateway"]
    assert isinstance(gateway, GatewaySettings)
    assert [split_address(address) for address in gateway.address] == [("specdec-coordinator", coordinator.port)]
    for own in settings.values():
        if own is gateway:  # it writes no spans
            continue
        assert own.otlp_traces_endpoint and urlsplit(own.otlp_traces_endpoint).hostname == "jaeger"
    config = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yaml").read_text(encoding="utf-8"))
    metrics = set()
    for name, own in settings.items():
        (alias,) = services[name]["networks"]["services"]["aliases"]
        metrics.add((alias, split_address(own.metrics_address or "")[1]))
    assert metrics == set(scraped(config))


def test_grafana_is_only_looked_at() -> None:
    """Claim: here and on Kubernetes every client of Grafana is an anonymous viewer, login is disabled, and there is no
    administrator with a well-known first password."""
    wanted = {
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION": "true",
        "GF_AUTH_DISABLE_LOGIN_FORM": "true",
        "GF_AUTH_BASIC_ENABLED": "false",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
    }
    (pod,) = [pod for pod in pods(overlay("monitoring")) if pod.owner == "Deployment/grafana"]
    assert {entry["name"]: entry["value"] for entry in pod.spec["containers"][0]["env"]} == wanted
    assert compose()["services"]["grafana"]["environment"] == wanted


def test_files_that_are_mounted_are_there() -> None:
    """Claim: every path of this repository that a container mounts exists; everything else mounted is a volume here."""
    for name, service in compose()["services"].items():
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (FILE.parent / source).exists(), (name, source)
                assert mount.endswith(":ro"), mount
            else:
                assert source in compose()["volumes"], (name, source)


def test_targets_and_drafts_can_be_scaled() -> None:
    """Claim: a second container of target and draft takes no name, host's port or volume of the first, and the
    coordinator finds both by the one name of the service: `--scale` of the file's first lines."""
    services = compose()["services"]
    asked = re.findall(r"--scale ([\w-]+)=2", FILE.read_text(encoding="utf-8"))
    assert asked == ["specdec-target", "specdec-draft"]
    for name in asked:
        assert not {"container_name", "ports", "volumes", "hostname"} & services[name].keys()
        port = next(text for text in services[name]["command"] if text.startswith("--port=")).partition("=")[2]
        flag = f"--{role_of(name)}={name}:{port}"
        assert flag in services["specdec-coordinator"]["command"]
