"""Every overlay, rendered: valid against the schemas of Kubernetes and of custom resources, and hardened throughout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.deploy.crds import definition_of, problems, schemas_of
from tests.deploy.manifests import KUBERNETES, OVERLAYS, Object, Pod, of_kind, overlay, pods, render

KUBERNETES_VERSION = "1.30"  # the oldest with all features in use: sleeping before a stop
CUSTOM_GROUPS = ("keda.sh", "leaderworkerset.x-k8s.io", "ray.io")
COMBINATIONS = {
    "multi-node with mtls": ("multi-node", "mtls"),
    "cpu-demo with mtls": ("cpu-demo", "mtls"),
}


def invalid(objects: tuple[Object, ...]) -> list[str]:
    """The errors of the objects by the schemas of Kubernetes; a kind without a schema is an error, unless it belongs to
    a custom group."""
    own = [content for content in objects if content["apiVersion"].partition("/")[0] not in CUSTOM_GROUPS]
    return [sentence for content in own for sentence in invalid_object(json.dumps(content))]


@cache
def invalid_object(text: str) -> tuple[str, ...]:
    """The errors of one object, as JSON: most objects are in several overlays."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    content = json.loads(text)
    name = f"{content['kind']}/{content['metadata']['name']}"
    try:
        validate.validate(content, KUBERNETES_VERSION, strict=True)
    except validate.ValidationError as error:
        return (f"{name}: {'.'.join(map(str, error.path))}: {error.message}",)
    except validate.SchemaNotFoundError as error:
        return (f"{name}: {error.message}",)
    return ()


@pytest.mark.parametrize("name", OVERLAYS)
def test_objects_are_valid(name: str) -> None:
    """Claim: every object of a built-in kind fits its schema, unknown fields refused; no kind is without a schema.

    By schema only: no API server has seen them.
    """
    assert invalid(overlay(name)) == []


def test_the_validator_refuses_what_is_wrong() -> None:
    """Claim: the check above can fail: an unknown field, a wrong type and an unknown kind are each found."""
    service = next(content for content in overlay("cpu-demo") if content["kind"] == "Service")
    assert invalid((service,)) == []
    assert invalid(({**service, "spec": {**service["spec"], "selectr": {}}},))
    assert invalid(({**service, "spec": {**service["spec"], "ports": 5}},))
    assert invalid(({**service, "kind": "Servise"},))


@pytest.mark.parametrize("name", OVERLAYS)
def test_custom_resources_are_valid(name: str) -> None:
    """Claim: custom resources fit their definitions, unknown fields refused. Skips where there are no definitions."""
    custom = [content for content in overlay(name) if content["apiVersion"].partition("/")[0] in CUSTOM_GROUPS]
    assert bool(custom) == (name in ("autoscaling", "multi-node", "kuberay"))
    if not custom:
        return
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    for content in custom:
        definition = definition_of(content["kind"])
        if definition is None:
            pytest.skip(f"no definition of {content['kind']} beside the checkout")
        schemas = schemas_of([definition])
        assert problems(schemas[content["apiVersion"], content["kind"]], content) == []


def test_the_checker_of_custom_resources_finds_mistakes() -> None:
    """Claim: the strict schema refuses an unknown field at any depth, a wrong type, a missing field and null, and
    accepts fields that a definition leaves open. Conclusive: each is planted in a resource that is otherwise right."""
    pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    definition = yaml.safe_load("""
    spec:
      group: example.org
      names: {kind: Thing}
      versions:
        - name: v1
          schema:
            openAPIV3Schema:
              type: object
              properties:
                spec:
                  type: object
                  required: [size]
                  properties:
                    size: {type: integer}
                    port: {x-kubernetes-int-or-string: true}
                    note: {type: string, nullable: true}
                    labels: {type: object, additionalProperties: {type: string}}
                    free: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {a: {type: string}}}
                    properties: {type: array, items: {type: object, properties: {name: {type: string}}}}
    """)
    (schema,) = schemas_of([definition]).values()
    right = {"size": 1, "port": "web", "note": None, "labels": {"x": "y"}, "free": {"b": 1}}
    right["properties"] = [{"name": "n"}]

    def said(**changed: object) -> list[str]:
        spec = {key: value for key, value in {**right, **changed}.items() if value != "absent"}
        return problems(schema, {"apiVersion": "example.org/v1", "kind": "Thing", "metadata": {"a": 1}, "spec": spec})

    assert said() == []
    wrong = ({"siez": 2}, {"size": "1"}, {"size": "absent"}, {"size": None}, {"port": 1.5}, {"labels": {"x": 1}})
    for planted in (*wrong, {"properties": [{"nmae": "n"}]}, {"free": {"a": 1}}):
        assert len(said(**planted)) == 1, planted


@pytest.mark.parametrize("parts", COMBINATIONS.values(), ids=COMBINATIONS)
def test_components_combine(parts: tuple[str, str], tmp_path: Path) -> None:
    """Claim: a component works on other overlays than the one it is shown with."""
    name, component = parts
    up = "../" * len(tmp_path.parts) + str(KUBERNETES).lstrip("/")
    content = {"resources": [f"{up}/overlays/{name}"], "components": [f"{up}/components/{component}"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    objects = render(tmp_path)
    assert invalid(objects) == []
    for pod in pods(objects):
        if pod.service is not None:
            names = [entry["name"] for entry in pod.service[1]["env"]]
            assert "SPECDEC_SSL_KEYFILE" in names and "SPECDEC_INSECURE" not in names


def mib(quantity: str) -> int:
    """A quantity of Kubernetes with a binary unit, in MiB."""
    return int(quantity[:-2]) * {"Mi": 1, "Gi": 1024}[quantity[-2:]]


def written_mib(pod: Pod, container: Object) -> int:
    """The sizes of the volumes on the node's disk that a container mounts."""
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    volumes = (one["emptyDir"] for one in pod.spec.get("volumes", ()) if one["name"] in mounted and "emptyDir" in one)
    return sum(mib(volume["sizeLimit"]) for volume in volumes if volume.get("medium") != "Memory")


@pytest.mark.parametrize("name", OVERLAYS)
def test_coordinators_spread_over_nodes(name: str) -> None:
    """Claim: coordinators spread over nodes, by a selector that finds them; with KubeRay its operator places them."""
    deployments = of_kind(overlay(name), "Deployment")
    found = [content for content in deployments if content["metadata"]["name"] == "specdec-coordinator"]
    assert len(found) == int(name != "kuberay")
    for content in found:
        template = content["spec"]["template"]
        (spread,) = template["spec"]["topologySpreadConstraints"]
        assert spread["topologyKey"] == "kubernetes.io/hostname"
        assert spread["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_hardened(name: str) -> None:
    """Claim: every pod runs as a plain user with a seccomp profile and no token; every container has no capability, a
    read-only root, requests, and bounds on memory and on the disk that its volumes may fill."""
    for pod in pods(overlay(name)):
        security = pod.spec["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] > 0, pod.owner
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod.spec["automountServiceAccountToken"] is False and pod.spec["serviceAccountName"]
        for container in pod.containers:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
            assert own.get("readOnlyRootFilesystem") is True or pod.owner.startswith("RayCluster"), pod.owner
            assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["requests"].keys()
            assert "memory" in container["resources"]["limits"]
            assert mib(container["resources"]["limits"]["ephemeral-storage"]) >= written_mib(pod, container), pod.owner
        for volume in pod.spec.get("volumes", ()):
            assert "hostPath" not in volume
            assert volume.get("emptyDir", {"sizeLimit": ""}).keys() >= {"sizeLimit"}, (pod.owner, volume)


@pytest.mark.parametrize("name", OVERLAYS)
def test_accounts_have_no_token(name: str) -> None:
    """Claim: every service account that a pod names exists, has no bound rights and gives no token."""
    objects = overlay(name)
    accounts = {account["metadata"]["name"]: account for account in of_kind(objects, "ServiceAccount")}
    assert {pod.spec["serviceAccountName"] for pod in pods(objects)} <= accounts.keys()
    assert all(account["automountServiceAccountToken"] is False for account in accounts.values())
    assert not of_kind(objects, "RoleBinding", "ClusterRoleBinding")
