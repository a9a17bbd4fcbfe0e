"""`specdec ray up`, recovery after each kind of loss, changes, `status` and `down`: real Ray nodes, processes, signals.

The tests of this file share one deployment and come in this order: it is begun, harmed, looked at, changed and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from specdec.ray.config import PORT_STEP
from tests.ray.conftest import Cluster, write
from tests.ray.running import PATIENCE_S, everyone, parent, processes, spaced_ports, texts, until
from tests.support.engine_models import Driver, make_tiny_model, random_tokens
from tests.support.gateways import ask
from tests.support.ports import free_ports
from tests.support.ranks import Followers
from tests.support.services import Client, Outcome, fixed

pytestmark = pytest.mark.more  # a Ray cluster takes half a minute to start
PROMPT = random_tokens(12, seed=3)
ASKED = {"max_tokens": 300, "temperature": 0, "ignore_eos": True}
DRAFTED = {**ASKED, "speculative": fixed(3)}
NUMBERS = dict.fromkeys(("target", "draft", "coordinator", "gateway"), 2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two tiny models of one tokenizer; a table model cannot be split over ranks."""
    folder = tmp_path_factory.mktemp("ray")
    return tuple(make_tiny_model(folder / name, "llama", seed) for seed, name in enumerate(("target", "draft")))


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Path]) -> list[int]:
    """The tokens as two ranks write them without Ray, services and draft: this process and another."""
    threads, followers = torch.get_num_threads(), Followers()
    torch.set_num_threads(1)
    try:
        return Driver(followers.lead(models[0], 2)).greedy(PROMPT, ASKED["max_tokens"])
    finally:
        followers.stop()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def deployment(models: tuple[Path, Path]) -> dict:
    """The file's content: two ranks, a draft, and fake GPUs for the ranks only."""
    ports = spaced_ports(5)
    return {
        "name": "nightly",
        "insecure": True,
        "log_level": "warning",
        "drain_grace_s": 1,
        "start_timeout_s": 600,
        "target": {
            "model": str(models[0]),
            "tensor_parallel_size": 2,
            "device": "cpu",
            "drain_grace_s": 0,
            "port": ports[0],
            "master_port": ports[1],
        },
        "draft": {"model": str(models[1]), "port": ports[2]},
        "coordinator": {"port": ports[3], "target_wait_s": PATIENCE_S},
        "gateway": {"port": ports[4], "served_model_name": "tiny"},
        "placement": {"target": {"labels": {"specdec-role": "target"}}, "draft": {"gpus": 0}},
    }


@pytest.fixture(scope="module")
def client(cluster: Cluster, deployment: dict, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of the deployment that `specdec ray up` has begun, run on the cluster as one of Ray's jobs; it
    outlives the job."""
    done = cluster.submit_up(tmp_path_factory.mktemp("file"), deployment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f":{deployment['gateway']['port']}/v1\n" in done.stdout
    address = re.search(r"specdec serves \S+ on (\S+) after", done.stdout)
    assert address is not None and f"--address {address[1]} --insecure" in done.stdout
    assert "waits for one node with 2 GPUs, 4 CPUs and label specdec-role=target" in done.stdout
    connected = Client(address[1])
    yield connected
    connected.close()
    cluster.command("down", "--name", "nightly")


def stream(client: Client, act: Callable[[], None], **asked: object) -> Outcome:
    """A generation during which `act` is called after 30 tokens; where it broke, the tokens received before."""
    outcome, acted = Outcome(), False
    with contextlib.suppress(grpc.RpcError):
        for response in client.stub.Generate(client.request(PROMPT, **asked), timeout=PATIENCE_S):
            client.take(outcome, response)
            if not acted and len(outcome.token_ids) >= 30:
                acted = True
                act()
    assert acted
    return outcome


def answers(address: str, asked: dict) -> list[int] | None:
    """The output ids of a completion; None while the gateway does not answer."""
    try:
        answer = ask(address, "/v1/completions", asked)
    except OSError:
        return None
    return answer.json["choices"][0]["token_ids"] if answer.status == 200 else None


def drafts(client: Client) -> bool:
    """Whether a generation has draft tokens."""
    return client.generate(PROMPT, **{**DRAFTED, "max_tokens": 40}).finished.statistics.num_draft_tokens > 0


def test_the_text_is_that_of_plain_processes(client: Client, expected: list[int]):
    """Claim: placed by Ray, the services write what two ranks write without them, with the draft's help.

    Conclusive: 300 greedy tokens of the engine alone, in other processes, are the reference.
    """
    until(lambda: drafts(client))
    outcome = client.generate(PROMPT, **DRAFTED)
    assert outcome.token_ids == expected
    assert outcome.started.numerics.tensor_parallel_size == 2


def test_each_rank_has_the_gpu_that_ray_gave_it(client: Client, models: tuple[Path, Path]):
    """Claim: each rank's process sees exactly one GPU, and the two ranks see different ones."""
    ranks = processes("target", models[0])
    seen = {visible_gpus(pid) for pid in ranks}
    assert client is not None and len(ranks) == 2 and seen == {"0", "1"}


def visible_gpus(pid: int) -> str:
    """CUDA_VISIBLE_DEVICES of a process."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)["CUDA_VISIBLE_DEVICES"]


def test_a_killed_draft_actor_costs_no_request(client: Client, expected: list[int], models: tuple[Path, Path]):
    """Claim: SIGKILL of the actor's own process amid a generation changes no token; its service ends with it, Ray
    starts both again, and the coordinator uses the new one by itself."""
    (service,) = processes("draft", models[1])
    outcome = stream(client, lambda: os.kill(parent(service), signal.SIGKILL), **DRAFTED)
    assert outcome.token_ids == expected
    until(lambda: drafts(client))
    (again,) = processes("draft", models[1])
    assert again != service


def test_a_killed_rank_rebuilds_the_group(client: Client, expected: list[int], models: tuple[Path, Path]):
    """Claim: one rank's end is the end of all; Ray starts them again, and the text goes on there, unseen by its client.

    Conclusive: its tokens are the undisturbed text, its statistics count the move, and both ranks are new.
    """
    before = processes("target", models[0])
    (second,) = (pid for pid, words in before.items() if "--node-rank=1" in words)
    outcome = stream(client, lambda: os.kill(second, signal.SIGKILL), **ASKED)
    assert outcome.finished is not None and outcome.token_ids == expected
    assert outcome.finished.statistics.num_target_changes == 1
    assert not before.keys() & processes("target", models[0]).keys()


def test_a_killed_gateway_is_back(client: Client, deployment: dict, models: tuple[Path, Path]):
    """Claim: the gateway of the deployment answers over HTTP with the text of `Generate`, and SIGKILL of its process
    has Ray start another at the same address. Conclusive: both answers are by different processes."""
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    (words,) = processes("gateway", models[0]).values()
    (host,) = (word.partition("=")[2] for word in words if word.startswith("--host="))
    address = f"{host}:{deployment['gateway']['port']}"
    expected = client.generate(PROMPT, max_tokens=20, temperature=0).token_ids
    seen = []
    for _ in range(2):
        until(lambda: answers(address, asked) == expected)
        (service,) = processes("gateway", models[0])
        seen.append(service)
        os.kill(service, signal.SIGKILL)
        until(lambda pid=service: pid not in processes("gateway", models[0]))
    assert seen[0] != seen[1]
    until(lambda: answers(address, asked) == expected)


def test_status_shows_each_actor(client: Client, cluster: Cluster):
    """Claim: the table has every actor with its node, its number of restarts and its gRPC health."""
    until(lambda: drafts(client))
    done = cluster.command("status", "--name", "nightly")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {cells[0]: cells for line in done.stdout.splitlines() if len(cells := cells_of(line)) == 5}
    health = {role: cells[4] for role, cells in rows.items()}
    restarts_count = {role: int(cells[3]) for role, cells in rows.items() if role != "actor"}
    serving = dict.fromkeys(("coordinator-0", "gateway-0", "draft-0", "target-0"), "SERVING")
    serving["target-0-rank-1"] = "follows target-0"
    assert health == {"actor": "health", **serving}
    assert restarts_count["coordinator-0"] == 0 and restarts_count["draft-0"] == 1
    assert restarts_count["target-0"] >= 1 and restarts_count["target-0-rank-1"] >= 1


def cells_of(line: str) -> list[str]:
    """The cells of a line of a table."""
    return [cell.strip() for cell in line.replace("┃", "│").strip("│").split("│")]


def test_up_again_changes_nothing(
    client: Client, cluster: Cluster, deployment: dict, models: tuple[Path, Path], tmp_path: Path
):
    """Claim: `up` with the file of a running deployment leaves every process as it is."""
    before = everyone(models)
    done = cluster.up(tmp_path, deployment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert everyone(models) == before and client.generate(PROMPT, max_tokens=3, ignore_eos=True).finished is not None


@pytest.fixture(scope="module")
def larger(deployment: dict) -> dict:
    """The file with two of everything."""
    return {**deployment, "placement": {**deployment["placement"], "targets": 2, "drafts": 2, "coordinators": 2}}


@pytest.fixture(scope="module")
def changed(larger: dict) -> dict:
    """That file with other settings of targets and drafts."""
    return larger | {name: {**larger[name], "max_num_seqs": 32} for name in ("target", "draft")}


@pytest.fixture(scope="module")
def second(client: Client, deployment: dict, models: tuple[Path, Path]) -> Iterator[Client]:
    """A client of the second coordinator."""
    (words,) = processes("coordinator", models[0]).values()
    (host,) = (word.partition("=")[2] for word in words if word.startswith("--host="))
    connected = Client(f"{host}:{deployment['coordinator']['port'] + PORT_STEP}")
    yield connected
    connected.close()


def test_up_adds_beside_what_runs(
    client: Client,
    second: Client,
    cluster: Cluster,
    larger: dict,
    expected: list[int],
    models: tuple[Path, Path],
    tmp_path: Path,
):
    """Claim: `up` with larger numbers starts a second target, draft, coordinator and gateway and touches no process
    that runs; texts go on meanwhile, and both coordinators write the text of plain processes, with drafts."""
    before = everyone(models)
    with texts([client], expected, prompt=PROMPT, **DRAFTED) as outcomes:
        done = cluster.up(tmp_path, larger)
        assert done.returncode == 0, done.stdout + done.stderr
    after = everyone(models)
    assert all(before[command] < after[command] for command in before)
    assert {command: len(pids) for command, pids in after.items()} == NUMBERS | {"target": 4}
    assert outcomes
    until(lambda: drafts(second))
    assert second.generate(PROMPT, **DRAFTED).token_ids == expected


def test_up_replaces_one_by_one_under_load(
    client: Client,
    second: Client,
    cluster: Cluster,
    changed: dict,
    expected: list[int],
    models: tuple[Path, Path],
    tmp_path: Path,
):
    """Claim: `up` with a changed setting of targets and of drafts replaces each, and no text fails or differs.

    Conclusive: two texts run at any time, a target ends its texts at once, and some have moved; the processes of
    targets and drafts are others, those of coordinators and gateways are the same.
    """
    before = everyone(models)
    with texts([client, second], expected, prompt=PROMPT, **DRAFTED) as outcomes:
        done = cluster.up(tmp_path, changed)
        assert done.returncode == 0, done.stdout + done.stderr
    after = everyone(models)
    assert not before["target"] & after["target"] and not before["draft"] & after["draft"]
    assert before["coordinator"] == after["coordinator"] and before["gateway"] == after["gateway"]
    assert sum(outcome.finished.statistics.num_target_changes for outcome in outcomes) > 0


def test_up_removes_what_is_no_longer_wanted(
    client: Client, cluster: Cluster, changed: dict, expected: list[int], models: tuple[Path, Path], tmp_path: Path
):
    """Claim: `up` with smaller numbers ends the second of each kind and no other, and no text fails meanwhile."""
    before = everyone(models)
    one = {**changed["placement"], "targets": 1, "drafts": 1, "coordinators": 1}
    with texts([client], expected, prompt=PROMPT, **DRAFTED):
        done = cluster.up(tmp_path, {**changed, "placement": one})
        assert done.returncode == 0, done.stdout + done.stderr
    after = everyone(models)
    assert all(after[command] < before[command] for command in before)
    assert {command: len(pids) for command, pids in after.items()} == dict.fromkeys(NUMBERS, 1) | {"target": 2}


def test_down_leaves_nothing(client: Client, cluster: Cluster, models: tuple[Path, Path]):
    """Claim: after `down` no process of a service and no actor remains."""
    assert processes("target", models[0]) and processes("draft", models[1]) and processes("coordinator", models[0])
    done = cluster.command("down", "--name", "nightly")
    assert done.stdout.strip() == "ended coordinator-0, draft-0, gateway-0, target-0, target-0-rank-1", done.stderr
    assert not processes("target", models[0]) and not processes("draft", models[1])
    assert not processes("coordinator", models[0]) and not processes("gateway", models[0])
    assert "nightly is not on this cluster" in cluster.command("status", "--name", "nightly").stderr


def test_what_cannot_start_is_reported_and_removed(cluster: Cluster, tmp_path: Path):
    """Claim: a service that cannot start ends `up` with its own message, and the started actors are gone."""
    target = {"model": str(tmp_path / "nowhere"), "port": free_ports(1)[0]}
    done = cluster.up(tmp_path, {"name": "nightly", "insecure": True, "target": target})
    assert done.returncode == 1
    assert re.search(r"specdec: (target-0|coordinator-0) on \S+ cannot start: .*nowhere", done.stderr), done.stderr


def test_actors_run_no_file_of_the_folder_of_the_command(cluster: Cluster, tmp_path: Path):
    """Claim: an actor and its service import nothing from the folder that `specdec ray up` is started in.

    Source: Ray puts the folder of a job's command first in the path of its actors. Conclusive: the planted modules
    leave a note and end their process; the actor reports what its own service said, so both were started.
    """
    (tmp_path / "start" / "specdec").mkdir(parents=True)
    for file in ("random.py", "grpc.py", "specdec/__init__.py"):
        planted = f"open({str(tmp_path / 'ran')!r}, 'a').write({file!r})\nraise SystemExit(9)\n"
        (tmp_path / "start" / file).write_text(planted)
    target = {"model": str(tmp_path / "nowhere"), "port": free_ports(1)[0]}
    file = write(tmp_path, {"name": "nightly", "insecure": True, "start_timeout_s": 60, "target": target})
    done = cluster.command("up", "--config", str(file), folder=tmp_path / "start")
    assert re.search(r"specdec: (target-0|coordinator-0) on \S+ cannot start: .*nowhere", done.stderr), done.stderr
    assert not (tmp_path / "ran").exists()


def test_what_finds_no_node_is_reported_and_removed(cluster: Cluster, tmp_path: Path):
    """Claim: where no node fits, `up` names the missing resources after its timeout, and nothing remains: it was not
    refused because of the deployment of the test before, and `down` finds nothing, which is no error."""
    deployment = {
        "name": "nightly",
        "insecure": True,
        "start_timeout_s": 1,
        "target": {"model": str(tmp_path)},
        "placement": {"target": {"labels": {"size": "huge"}}},
    }
    done = cluster.up(tmp_path, deployment)
    assert done.returncode == 1
    assert "not serving within 1 s: target-0 (one node with 1 GPU, 2 CPUs and label size=huge)" in done.stderr
    assert "nothing to end" in cluster.command("down", "--name", "nightly").stdout
