"""Rendered manifests as values: objects, pods and containers, and the settings the real command line reads from them.

Rendering is kubectl's own. Of Kubernetes only the rules for a container's arguments and variables are repeated here:
`$(NAME)` in both, and the sources of variables.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from specdec.cli.main import COMMANDS, KNOWN_FIELDS
from specdec.cli.options import make_parser, read_settings
from specdec.config import ServiceSettings
from specdec.gateway_settings import GatewaySettings
from tests.hygiene.sources import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = tuple(sorted(file.parent.name for file in KUBERNETES.glob("overlays/*/kustomization.yaml")))
SERVICES = ("coordinator", "draft", "gateway", "target")
REFERENCE = re.compile(r"\$\(([A-Za-z_][\w.-]*)\)")
# The variable LeaderWorkerSet gives each pod of a group; its pods differ by the index.
GROUP = {"LWS_LEADER_ADDRESS": "specdec-ranks-0.specdec-ranks.specdec"}
Object = dict[str, Any]
Served = ServiceSettings | GatewaySettings


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod template: its owner, labels and spec; `given`: variables its controller adds."""

    owner: str
    namespace: str
    labels: dict[str, str]
    spec: Object
    given: dict[str, str] = field(default_factory=dict)

    @property
    def containers(self) -> list[Object]:
        """The init containers and the containers."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def service(self) -> tuple[str, Object] | None:
        """(draft, target, coordinator or gateway; its container), where the image's own command is run."""
        for container in self.spec["containers"]:
            name = container["image"].rpartition(":")[0].removeprefix("specdec-")
            if name in SERVICES and "command" not in container:
                return name, container
        return None


@cache
def render(folder: Path) -> tuple[Object, ...]:
    """The objects of a kustomization. Skips where there is no kubectl; fails with kustomize's own words."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: manifests cannot be rendered")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return tuple(content for content in yaml.safe_load_all(done.stdout) if content)


def example(file: str, folder: Path, resources: str = "") -> tuple[Object, ...]:
    """The objects of the kustomization whose lines the comment of a component's file gives to users, rendered in an
    empty folder; `resources`: an overlay that they are added to."""
    lines = (KUBERNETES / "components" / file).read_text(encoding="utf-8").splitlines()
    text = "\n".join(line.removeprefix("#   ") for line in lines if line.startswith("#   ")) + "\n"
    if resources:
        text = f"resources: [specdec/deploy/kubernetes/overlays/{resources}]\n" + text
    up = "../" * len(folder.parts) + str(KUBERNETES).lstrip("/")
    (folder / "kustomization.yaml").write_text(text.replace("specdec/deploy/kubernetes", up), encoding="utf-8")
    return render(folder)


def overlay(name: str) -> tuple[Object, ...]:
    """The objects of one overlay."""
    return render(KUBERNETES / "overlays" / name)


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    """The objects of these kinds."""
    return [content for content in objects if content["kind"] in kinds]


def pods(objects: tuple[Object, ...]) -> list[Pod]:
    """Every pod template, of built-in kinds, of LeaderWorkerSet and of RayCluster."""
    return [pod for content in objects for pod in _pods_of(content)]


def _pods_of(content: Object) -> Iterator[Pod]:
    kind, name = content["kind"], content["metadata"]["name"]
    namespace = content["metadata"].get("namespace", "")

    def pod(template: Object, suffix: str = "", given: Mapping[str, str] | None = None) -> Pod:
        labels = template.get("metadata", {}).get("labels", {})
        return Pod(f"{kind}/{name}{suffix}", namespace, labels, template["spec"], dict(given or {}))

    if kind in ("Deployment", "StatefulSet", "Job"):
        yield pod(content["spec"]["template"])
    elif kind == "LeaderWorkerSet":
        group = content["spec"]["leaderWorkerTemplate"]
        size = {**GROUP, "LWS_GROUP_SIZE": str(group["size"])}
        yield pod(group["leaderTemplate"], "/leader", {**size, "LWS_WORKER_INDEX": "0"})
        for index in range(1, group["size"]):
            yield pod(group["workerTemplate"], f"/worker-{index}", {**size, "LWS_WORKER_INDEX": str(index)})
    elif kind == "RayCluster":
        yield pod(content["spec"]["headGroupSpec"]["template"], "/head")
        for group in content["spec"].get("workerGroupSpecs", ()):
            yield pod(group["template"], f"/{group['groupName']}")


def own_pods(name: str) -> list[Pod]:
    """The pods of an overlay but for Ray's, which are made by its operator's rules."""
    return [pod for pod in pods(overlay(name)) if not pod.owner.startswith("RayCluster")]


def environment_of(pod: Pod, container: Object, objects: tuple[Object, ...]) -> dict[str, str]:
    """The variables a container is started with, in order, each seeing those before it."""
    found = dict(pod.given)
    for entry in container.get("env", ()):
        text = entry["value"] if "value" in entry else _value_from(entry["valueFrom"], pod, container, objects)
        if text is not None:
            found[entry["name"]] = expanded(text, found)
    return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as the kubelet does; a name it does not know fails, for the kubelet would leave it there."""
    unknown = [name for name in REFERENCE.findall(text) if name not in variables]
    assert not unknown, f"{text}: {unknown} are not variables of this container, or come after it"
    return REFERENCE.sub(lambda match: variables[match.group(1)], text)


def _value_from(source: Object, pod: Pod, container: Object, objects: tuple[Object, ...]) -> str | None:
    if "configMapKeyRef" in source:
        wanted = source["configMapKeyRef"]
        found = [
            content["data"][wanted["key"]]
            for content in of_kind(objects, "ConfigMap")
            if content["metadata"]["name"] == wanted["name"] and content["metadata"]["namespace"] == pod.namespace
        ]
        assert len(found) == 1, f"{pod.owner}: {wanted} is in {len(found)} config maps"
        return found[0]
    if "resourceFieldRef" in source:
        part, _, name = source["resourceFieldRef"]["resource"].partition(".")
        return str(math.ceil(cpu_count(container["resources"][part][name])))
    assert "secretKeyRef" in source, source
    return None if source["secretKeyRef"].get("optional") else "secret"


def cpu_count(quantity: str) -> float:
    """CPUs of `2` or `500m`."""
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


def arguments_of(pod: Pod, container: Object, objects: tuple[Object, ...]) -> list[str]:
    """The arguments of the container's command."""
    variables = environment_of(pod, container, objects)
    return [expanded(text, variables) for text in container.get("args", ())]


def parse(name: str, arguments: list[str], environment: Mapping[str, str]) -> Served:
    """The settings `specdec NAME` reads from arguments and environment: the real parser, schema and refusals."""
    command = COMMANDS[name]
    parser = make_parser(name, command.summary, command.settings)
    settings = read_settings(command.settings, parser, arguments, environment, KNOWN_FIELDS)
    assert isinstance(settings, Served)
    return settings


def settings_of(pod: Pod, objects: tuple[Object, ...], secrets: Path) -> Served | None:
    """The settings a pod's service starts with; None for other pods. Files of secrets are taken from the folder
    `secrets`, since the command checks that they exist."""
    if pod.service is None:
        return None
    name, container = pod.service
    environment = environment_of(pod, container, objects)
    mounted = {volume["name"] for volume in pod.spec.get("volumes", ()) if "secret" in volume}
    paths = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] in mounted]

    def moved(text: str) -> str:
        for path in paths:
            text = text.replace(f"{path}/", f"{secrets}/")
        return text

    arguments = [moved(text) for text in arguments_of(pod, container, objects)]
    return parse(name, arguments, {key: moved(value) for key, value in environment.items()})
