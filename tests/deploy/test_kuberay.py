"""The KubeRay overlay: `specdec ray up` accepts its deployment file, the cluster has capacity for it, and the commands
of docs/ray.md fit the manifests."""

from __future__ import annotations

import re
from pathlib import Path

from specdec.config import TargetSettings
from specdec.ray.config import RaySettings, read_deployment
from specdec.ray.placing import plan
from tests.deploy.images import DOCKERFILE, stages
from tests.deploy.manifests import Object, of_kind, overlay, pods
from tests.hygiene.sources import ROOT

TITLE = "## On Kubernetes (KubeRay)\n"


def deployment(folder: Path) -> RaySettings:
    """The deployment that `specdec ray up` reads from the rendered config map."""
    (content,) = of_kind(overlay("kuberay"), "ConfigMap")
    file = folder / "specdec.yaml"
    file.write_text(content["data"]["specdec.yaml"], encoding="utf-8")
    return read_deployment(str(file))


def cluster() -> Object:
    """The RayCluster's spec."""
    (content,) = of_kind(overlay("kuberay"), "RayCluster")
    spec: Object = content["spec"]
    return spec


def test_the_deployment_is_one_that_ray_up_takes(tmp_path: Path) -> None:
    """Claim: the real reader accepts the file, its models are in the image, and the Services have the ports of
    coordinator and gateway."""
    read = deployment(tmp_path)
    assert read.draft is not None
    assert all(map(stages()["ray"].holds, (read.target.model, read.draft.model, read.coordinator.tokenizer)))
    assert read.gateway is not None and read.gateway.model == read.target.model
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind(overlay("kuberay"), "Service")}
    ports = {name: [port["port"] for port in spec["ports"]] for name, spec in services.items()}
    assert ports == {"specdec-coordinator": [read.coordinator.port], "specdec-gateway": [read.gateway.port]}


def test_the_cluster_has_capacity_for_it(tmp_path: Path) -> None:
    """Claim: every actor finds a node with its labels and CPUs: the target's group on one node, each draft on another;
    the head takes none. Conclusive: the actors are those that the real command plans."""
    groups = cluster()["workerGroupSpecs"]
    actors = plan(deployment(tmp_path))
    beside = [actor for actor in actors if actor.group is not None]
    alone = [actor for actor in actors if actor.group is None]
    assert isinstance(beside[0].settings, TargetSettings) and len({actor.group.name for actor in beside}) == 1
    for members, pod_count in ((beside, 1), (alone, len(alone))):
        fitting = [group for group in groups if dict(members[0].labels).items() <= group["labels"].items()]
        assert len(fitting) == 1 and fitting[0]["replicas"] >= pod_count
        assert int(fitting[0]["rayStartParams"]["num-cpus"]) * pod_count >= sum(actor.cpus for actor in members)
    assert cluster()["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_job_and_the_head_agree(tmp_path: Path) -> None:
    """Claim: the job reads a file that the head mounts; both have the same token, and Ray's version is pinned."""
    objects = overlay("kuberay")
    (job,) = [pod for pod in pods(objects) if pod.owner == "Job/specdec-up"]
    (head,) = [pod for pod in pods(objects) if pod.owner == "RayCluster/specdec-ray/head"]
    container = job.spec["containers"][0]
    asked = Path(container["args"][-1])
    mounts = {mount["mountPath"]: mount["name"] for mount in head.spec["containers"][0]["volumeMounts"]}
    (content,) = of_kind(objects, "ConfigMap")
    volumes = {volume["name"]: volume for volume in head.spec["volumes"]}
    assert volumes[mounts[str(asked.parent)]]["configMap"]["name"] == content["metadata"]["name"]
    assert asked.name in content["data"]
    assert container["args"][:5] == ["python", "-m", "specdec.cli", "ray", "up"]
    (token,) = [entry for entry in container["env"] if entry["name"] == "RAY_AUTH_TOKEN"]
    wanted = {"mode": "token", "secretName": token["valueFrom"]["secretKeyRef"]["name"]}
    assert cluster()["authOptions"] == wanted
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert f"ray=={cluster()['rayVersion']}" in constraints


def section() -> str:
    """The section of docs/ray.md about KubeRay, continued lines of commands joined."""
    text = (ROOT / "docs" / "ray.md").read_text(encoding="utf-8").partition(TITLE)[2].partition("\n## ")[0]
    return re.sub(r" \\\n\s*", " ", text)


def test_the_page_creates_the_secret_that_is_read() -> None:
    """Claim: docs/ray.md creates one secret, with the name and key that the cluster and the job read, in their
    namespace. Conclusive: the page's command and the rendered manifests are read, and neither is repeated here."""
    created = re.findall(r"kubectl -n (\S+) create secret generic (\S+) --from-literal=(\w+)=", section())
    objects = overlay("kuberay")
    (job,) = [pod for pod in pods(objects) if pod.owner == "Job/specdec-up"]
    entries = [entry for container in job.containers for entry in container.get("env", ())]
    (read,) = [entry["valueFrom"]["secretKeyRef"] for entry in entries if "valueFrom" in entry]
    assert created == [(job.namespace, read["name"], read["key"])]
    assert cluster()["authOptions"]["secretName"] == read["name"]


def test_the_page_builds_the_image_that_is_run() -> None:
    """Claim: docs/ray.md builds a stage the Dockerfile has, with the models of the deployment, by the command the
    Dockerfile gives, under the one name all pods of the overlay run; and loads and renames that image."""
    text = section()
    ((command, stage, image),) = re.findall(r"(docker build .*--target (\S+) -t (\S+) \.)\n", text)
    assert stages()[stage].copies == stages()["ray"].copies
    given = [" ".join(line.split()) for line in DOCKERFILE.read_text(encoding="utf-8").splitlines()]
    assert f"# {command}" in given
    assert {container["image"] for pod in pods(overlay("kuberay")) for container in pod.containers} == {image}
    assert re.findall(r"kind load docker-image (\S+)", text) == [image]
    assert re.findall(r"name: ([\w-]+), newName", text) == [image.rpartition(":")[0]]


def test_the_page_names_what_is_there() -> None:
    """Claim: pods, containers, the job, the addresses of coordinator and gateway, the clients' label and folders that
    the section names are those of the manifests; and services are started as the job does it, since the image has no
    script."""
    text, objects = section(), overlay("kuberay")
    everyone = {pod.labels["app.kubernetes.io/component"]: pod for pod in pods(objects)}
    asked = set(re.findall(r"-l app\.kubernetes\.io/component=([\w-]+)", text))
    assert asked == {"ray-head", "ray-up"} and asked <= set(everyone)
    names = [container["name"] for container in everyone["ray-head"].containers]
    assert set(re.findall(r"exec (?:-i )?\$HEAD -c (\S+)", text)) == set(names)
    assert set(re.findall(r"job/([\w-]+)", text)) == {job["metadata"]["name"] for job in of_kind(objects, "Job")}
    for service, forms in zip(
        of_kind(objects, "Service"), ((" {}:{} --insecure", "`dns:///{}.specdec:{}`"), ("`http://{}.specdec:{}/v1`",))
    ):
        name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
        assert service["metadata"]["namespace"] == "specdec"
        assert all(form.format(name, port) in text for form in forms), name
    clients = [
        peer["podSelector"]["matchLabels"]
        for policy in of_kind(objects, "NetworkPolicy")
        for rule in policy["spec"].get("ingress", ())
        for peer in rule["from"]
        if "namespaceSelector" in peer
    ]
    assert clients == [{"specdec.client": "true"}] and '`specdec.client: "true"`' in text
    folders = re.findall(r"kubectl (?:apply|delete) .*-k (\S+)", text)
    assert folders and all((ROOT / folder / "kustomization.yaml").is_file() for folder in folders)
    commands = re.findall(r"(?:-- |&& )(.+? ray (?:up|status|down)|.+? generate) ?", text)
    assert len(commands) >= 3 and all("python -m specdec.cli " in command for command in commands)
