"""The file of `specdec ray up`, and the settings, placements and addresses from it. No cluster is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml

from specdec.cli.main import run_command
from specdec.cli.options import UsageError
from specdec.config import CoordinatorSettings, TargetSettings
from specdec.errors import ConfigError
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import arguments_of
from specdec.ray.config import RaySettings, read_deployment
from specdec.ray.placing import addresses_of, plan, settings_on
from tests.hygiene.sources import ROOT

MINIMAL = {"insecure": True, "target": {"model": "t", "tensor_parallel_size": 2}, "draft": {"model": "d"}}
FOLDER = ROOT / "deploy" / "ray"


def written(folder: Path, content: object) -> str:
    """A file with the content."""
    file = folder / "deployment.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "must hold NAME: VALUE lines"),
        ("a: [", "is not YAML"),
        ({"insecure": True}, "target is missing in"),
        ({"insecure": True, "target": {}}, "target.model is missing in"),
        ({**MINIMAL, "target": {"model": "t", "tensor_paralel_size": 2}}, "did you mean tensor_parallel_size?"),
        ({**MINIMAL, "nam": "x"}, "nam in .* is not known; did you mean name?"),
        (
            {**MINIMAL, "placement": {"draft": {"gpus": -1}}},
            r"placement.draft.gpus in .* is -1; it must be greater than",
        ),
        (
            {**MINIMAL, "target": {"model": "t", "node_rank": 1}},
            "target.node_rank is not allowed in the file: Ray chooses",
        ),
        ({**MINIMAL, "coordinator": {"draft": "a:1"}}, "coordinator.draft is not allowed in the file"),
        ({**MINIMAL, "gateway": {"address": ["a:1"]}}, "gateway.address is not allowed in the file"),
        ({**MINIMAL, "gateway": {"portt": 1}}, "gateway.portt in .* is not known; did you mean port?"),
        ({**MINIMAL, "gateway": {"port": 50051}}, "they must differ and be 1 to 65535"),
        ({**MINIMAL, "gateway": {"insecure": False}}, "gateway: the address of the node reaches beyond this machine"),
        ({**MINIMAL, "draft": {"model": "d", "port": 50051}}, "they must differ and be 1 to 65535"),
        ({**MINIMAL, "placement": {"targets": 2}, "draft": {"model": "d", "port": 50062}}, "they must differ and be 1"),
        (
            {**MINIMAL, "placement": {"targets": 1500}},
            r"placement.targets in .* is 1500; it must be less than or equal",
        ),
        (
            {**MINIMAL, "target": {"model": "t", "port": 65530}, "placement": {"targets": 2}},
            "they must differ and be 1",
        ),
        ({**MINIMAL, "insecure": False}, "target: the address of the node reaches beyond this machine"),
        ({**MINIMAL, "target": {"model": "t", "block_size": 5}}, "--block-size is 5; it must be 0 or a power of two"),
    ],
)
def test_errors_are_reported_in_one_line(content: object, said: str, tmp_path: Path):
    """Claim: a file is refused with the key, the value and the remedy before any request to Ray."""
    file = written(tmp_path, content)
    with pytest.raises(UsageError, match=said) as caught:
        run_command(["ray", "up", "--config", file, "--ray-address", "127.0.0.1:1"])
    assert "\n" not in str(caught.value) and file in str(caught.value)


def test_the_mode_of_authentication_must_be_said(monkeypatch: pytest.MonkeyPatch):
    """Claim: without RAY_AUTH_MODE nothing is connected to, since Ray would decide by what lies in the home folder."""
    pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE is not set"):
        run_command(["ray", "status", "--ray-address", "127.0.0.1:1"])


def test_sections_take_what_stands_above_them():
    """Claim: log level, grace and TLS are said once, a section overrules them, and the tokenizer is the target's."""
    own = RaySettings(
        **{**MINIMAL, "log_level": "error", "drain_grace_s": 7, "draft": {"model": "d", "drain_grace_s": 1}}
    )
    assert {service.log_level for service in own.services.values()} == {"error"}
    assert [service.drain_grace_s for service in own.services.values()] == [7, 1, 7]
    assert own.coordinator.tokenizer == "t" and own.coordinator.insecure


def test_the_group_holds_ranks_and_coordinator():
    """Claim: ranks and coordinator are one group of a node; the draft is outside, by its label."""
    actors = plan(RaySettings(**MINIMAL, placement={"target": {"cpus": 3}, "coordinator_cpus": 2}))
    assert [actor.role for actor in actors] == ["target-0", "target-0-rank-1", "coordinator-0", "draft-0"]
    group = actors[0].group
    assert group is not None and group.bundles == ((3, 1), (3, 1), (2, 0)) and group.name == "target-0"
    assert [actor.group for actor in actors] == [group, group, group, None]
    assert [actor.bundle for actor in actors[:3]] == [0, 1, 2]
    assert actors[3].labels == {"specdec-role": "draft"}
    assert actors[0].wants == "one node with 2 GPUs and 8 CPUs"
    assert actors[3].wants == "a node with 1 GPU, 1 CPU and label specdec-role=draft"


def test_services_get_the_addresses_of_their_node():
    """Claim: a rank is a machine with one rank that meets the others on loopback; a coordinator reads the files that it
    is given; the flags made of that are accepted again."""
    first, second, coordinator, draft = plan(RaySettings(**MINIMAL, placement={"target": {"cpus": 3}}))
    rank = settings_on(second, "10.0.0.7")
    assert isinstance(rank, TargetSettings)
    assert (rank.host, rank.port, rank.node_rank, rank.nnodes, rank.threads) == ("10.0.0.7", 50052, 1, 2, 3)
    assert (rank.master_addr, rank.master_port) == ("127.0.0.1", 50054)
    assert (second.follows, second.reached_at("10.0.0.7")) == ("target-0", "")
    beside = settings_on(coordinator, "10.0.0.7", {"target": os.devnull, "draft": os.devnull})
    assert isinstance(beside, CoordinatorSettings)
    assert beside.target == beside.draft == (f"@{os.devnull}",)
    assert settings_on(draft, "10.0.0.9").host == "10.0.0.9"
    for command, settings in (("target", rank), ("coordinator", beside)):
        values = dict(
            argument.removeprefix("--").split("=", 1) for argument in arguments_of(settings) if "=" in argument
        )
        assert values["host"] == "10.0.0.7", command
        assert type(settings)(**settings.model_dump()) == settings


def test_the_gateway_is_beside_the_coordinator():
    """Claim: a gateway is in the group of ranks and coordinator, has the target's tokenizer, reaches the coordinator on
    their node, and needs keys or `insecure` there; without its section there is none."""
    own = RaySettings(
        **{**MINIMAL, "log_level": "error", "otlp_traces_endpoint": "http://a:1", "gateway": {"port": 81}}
    )
    actors = plan(own)
    roles = [actor.role for actor in actors]
    assert roles == ["target-0", "target-0-rank-1", "coordinator-0", "gateway-0", "draft-0"]
    assert [actor.bundle for actor in actors[:4]] == [0, 1, 2, 3]
    assert actors[3].group == actors[0].group and actors[3].group is not None and len(actors[3].group.bundles) == 4
    assert actors[0].wants == "one node with 2 GPUs and 4 CPUs"
    settings = settings_on(actors[3], "10.0.0.7")
    assert isinstance(settings, GatewaySettings)
    assert (settings.host, settings.port, settings.address) == ("10.0.0.7", 81, ("10.0.0.7:50051",))
    assert (settings.model, settings.log_level) == ("t", "error")
    assert GatewaySettings(**settings.model_dump()) == settings
    assert not any(actor.command == "gateway" for actor in plan(RaySettings(**MINIMAL)))


def test_http_beyond_a_machine_needs_keys(tmp_path: Path):
    """Claim: mutual TLS to the coordinator is not enough for HTTP on a node's address; a file of keys is."""
    tls = {}
    for name in ("certfile", "keyfile", "ca_certs"):
        (tmp_path / name).touch()
        tls[f"ssl_{name}"] = str(tmp_path / name)
    content = {"target": {"model": "t"}, "gateway": {}, **tls}
    with pytest.raises(ValueError, match="give --api-keys-file"):
        RaySettings(**content)
    RaySettings(**{**content, "gateway": {"api_keys_file": tls["ssl_keyfile"]}})


def test_a_host_of_the_file_is_kept():
    """Claim: what listens on loopback by the file's word is reached there, and needs no TLS."""
    local = {"host": "127.0.0.1"}
    own = RaySettings(target={"model": "t", **local}, draft={"model": "d", **local}, coordinator={"port": 7, **local})
    coordinator = next(actor for actor in plan(own) if actor.command == "coordinator")
    hosts = {"target-0": "10.0.0.7", "draft-0": "10.0.0.8"}
    assert [addresses_of(kind, hosts) for kind in coordinator.reaches] == [["127.0.0.1:50052"], ["127.0.0.1:50053"]]
    assert coordinator.reached_at("10.0.0.7") == "127.0.0.1:7"


def test_the_shipped_files_are_valid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Claim: the files of deploy/ray are read without a complaint, and folders in them become whole paths."""
    monkeypatch.chdir(ROOT)
    own = read_deployment(str(FOLDER / "cpu.yaml"))
    assert own.target.model == own.coordinator.tokenizer == str(ROOT / "specdec" / "embedded" / "target")
    text = (FOLDER / "specdec.yaml").read_text(encoding="utf-8")
    for name in ("tls.crt", "tls.key", "ca.crt", "keys"):
        (tmp_path / name).write_text("", encoding="utf-8")
    secured = read_deployment(written(tmp_path, text.replace("/etc/specdec/tls", str(tmp_path))))
    assert all(service.has_tls for service in secured.services.values())
    assert secured.target.tensor_parallel_size == 4


def test_the_cluster_file_is_what_ray_up_takes():
    """Claim: Ray's own schema and checks accept deploy/ray/cluster.yaml, and its nodes have what specdec.yaml asks for.

    Conclusive: the schema comes with the installed Ray and refuses unknown keys; a planted one is refused.
    """
    pytest.importorskip("ray", reason="Ray is not installed")
    import jsonschema
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    content = yaml.safe_load((FOLDER / "cluster.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(content, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**content, "available_node_types": {"head": {"labelz": {}}}}, schema)
    asked = yaml.safe_load((FOLDER / "specdec.yaml").read_text(encoding="utf-8"))
    kinds = content["available_node_types"]
    for role in ("target", "draft"):
        assert kinds[role]["labels"] == asked["placement"][role]["labels"]
    place = asked["placement"]["target"]
    ranks = asked["target"]["tensor_parallel_size"]
    assert kinds["target"]["resources"]["GPU"] >= ranks * place["gpus"]
    assert kinds["target"]["resources"]["CPU"] >= ranks * place["cpus"] + sum(
        asked["placement"][name] for name in ("coordinator_cpus", "gateway_cpus")
    )


def test_the_cluster_file_copies_the_checkout(monkeypatch: pytest.MonkeyPatch):
    """Claim: `ray up deploy/ray/cluster.yaml` in the root of the checkout, as docs/ray.md has it, copies the checkout,
    without large files of no use on a node.

    Conclusive: Ray only expands `~` in the source of a mount, so the rest is relative to the folder the command runs
    in, not to the folder of the file.
    """
    monkeypatch.chdir(ROOT)
    content = yaml.safe_load((FOLDER / "cluster.yaml").read_text(encoding="utf-8"))
    copied = Path(os.path.expanduser(content["file_mounts"]["~/source"]))
    assert (copied / "pyproject.toml").is_file() and (copied / "constraints.txt").is_file()
    assert copied.samefile(ROOT)
    assert {".git", ".venv", "out"} <= set(content["rsync_exclude"])
    assert "\nray up deploy/ray/cluster.yaml\n" in (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")


def test_no_machine_takes_the_image_ray_would_choose():
    """Claim: every kind of machine names its image, one for all, and docs/ray.md says that it is to be filled in.

    Conclusive: Ray takes its own, whose Python is older than 3.11, where ImageId is absent, empty or latest_dlami.
    """
    content = yaml.safe_load((FOLDER / "cluster.yaml").read_text(encoding="utf-8"))
    kinds = content["available_node_types"].values()
    (image,) = {kind["node_config"].get("ImageId", "") for kind in kinds}
    assert image.startswith("ami-")
    assert "`ImageId`, marked FILL IN" in (ROOT / "docs" / "ray.md").read_text(encoding="utf-8")


def test_nodes_compile_the_kernels():
    """Claim: nodes that install specdec from the checkout have a compiler before they do, so that the CPU engine's
    kernels are compiled there, and take no library from another machine.

    Conclusive: without its line, or with it below the installation, the order of the commands is refused.
    """
    content = yaml.safe_load((FOLDER / "cluster.yaml").read_text(encoding="utf-8"))
    commands = content["setup_commands"]
    assert compiles_first(commands) and "_kernels.so" in content["rsync_exclude"]
    compilers = [command for command in commands if "install -y gcc" in command]
    others = [command for command in commands if command not in compilers]
    assert not compiles_first(others) and not compiles_first(others + compilers)


def compiles_first(commands: list[str]) -> bool:
    """Whether a compiler is installed before specdec is."""
    compilers = [i for i, command in enumerate(commands) if "apt-get install -y gcc libc6-dev" in command]
    (installation,) = [i for i, command in enumerate(commands) if "-e ~/source" in command]
    return bool(compilers) and compilers[0] < installation
