"""The KubeRay overlay: its deployment file is one that `specdec ray up` takes, and the cluster has room for it."""

from __future__ import annotations

from pathlib import Path

from specdec.config import TargetSettings
from specdec.ray.config import RaySettings, read_deployment
from specdec.ray.placing import plan
from tests.deploy.images import IMAGE_ROOT, stages
from tests.deploy.manifests import Object, of_kind, overlay, pods


def deployment(folder: Path) -> RaySettings:
    """What `specdec ray up` reads from the rendered config map."""
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
    """Claim: the real reader accepts the file, its models are in the image, and the Service has the coordinator's
    port."""
    read = deployment(tmp_path)
    copied = {f"{IMAGE_ROOT}/{source}" for source, _ in stages()["ray"].copies}
    assert read.draft is not None and {read.target.model, read.draft.model, read.coordinator.tokenizer} <= copied
    (service,) = of_kind(overlay("kuberay"), "Service")
    assert [port["port"] for port in service["spec"]["ports"]] == [read.coordinator.port]


def test_the_cluster_has_room_for_it(tmp_path: Path) -> None:
    """Claim: every actor finds a node with its labels and CPUs: the target's group on one node, the draft on another;
    the head takes none. Conclusive: the actors are those that the real command plans."""
    groups = cluster()["workerGroupSpecs"]
    actors = plan(deployment(tmp_path))
    beside = [actor for actor in actors if actor.bundle is not None]
    alone = [actor for actor in actors if actor.bundle is None]
    assert isinstance(beside[0].settings, TargetSettings) and len(alone) == 1
    for members in (beside, alone):
        fitting = [group for group in groups if dict(members[0].labels).items() <= group["labels"].items()]
        assert len(fitting) == 1 and fitting[0]["replicas"] >= 1
        assert int(fitting[0]["rayStartParams"]["num-cpus"]) >= sum(actor.cpus for actor in members)
    assert cluster()["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_the_job_and_the_head_agree(tmp_path: Path) -> None:
    """Claim: the job asks for a file that the head mounts; both know one token, and Ray's version is the pinned one."""
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
