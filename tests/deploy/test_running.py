"""The commands of the containers, as plain processes: the same commands from the same files as the images hold.

Images are not built and there is no cluster. Each process has, instead of a container, a folder with exactly the files
its stage of the Dockerfile copies, imports specdec from there only, and coordinator and gateway cannot import a model
library. Addresses become free ones of loopback, of IPv6 where this machine has it; every other word of the commands is
the manifests'.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.requirements import ENGINE
from specdec.config import ServiceSettings
from specdec.folders import EMBEDDED_MODELS
from specdec.launch.children import Child, stop_all, wait_all_ready
from specdec.settings import listening_host
from tests.deploy.compose import OWN, compose, role_of
from tests.deploy.images import IMAGE_ROOT, stages
from tests.deploy.manifests import arguments_of, environment_of, of_kind, overlay, parse, pods
from tests.hygiene.sources import ROOT
from tests.support.ports import free_ports
from tests.support.services import Client, fixed

Command = tuple[list[str], dict[str, str]]  # arguments, variables
FLAG_ADDRESS = re.compile(r"^(--(?:health-|metrics-)?address|--target|--draft)=.+:(\d+)$")
LOOPBACK = "127.0.0.1" if listening_host("::") != "::" else "[::1]"


def of_kubernetes(role: str) -> Command:
    """The command of a service in the cpu-demo overlay."""
    objects = overlay("cpu-demo")
    (pod,) = [pod for pod in pods(objects) if pod.service and pod.service[0] == role]
    assert pod.service
    container = pod.service[1]
    return arguments_of(pod, container, objects), environment_of(pod, container, objects)


def of_compose(role: str) -> Command:
    """The command of a service in the compose file; there is no Jaeger here, which costs spans only."""
    (name,) = [name for name in OWN if role_of(name) == role]
    return list(compose()["services"][name]["command"]), {}


def lay_out(role: str, folder: Path) -> Path:
    """A folder with the files that the service's stage copies, and the kernels if it takes them and they are here."""
    root = folder / role
    left_out = shutil.ignore_patterns("__pycache__", "_kernels.so", "smollm2-*", "target-heads")  # .dockerignore
    for source, destination in stages()[role].copies:
        if not source.startswith(("pyproject", "constraints", "deploy")):
            path = root / destination / Path(source).name if destination.endswith("/") else root / destination
            path.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, path, symlinks=True, ignore=left_out)
            else:
                shutil.copy(ROOT / source, path)
    for stage, source, destination in stages()[role].taken:
        built = ROOT / Path(source).relative_to(IMAGE_ROOT) if stage == "kernels" else ROOT / "none"
        if built.is_file():
            shutil.copy(built, root / destination)
    return root


def forbid(names: frozenset[str], folder: Path) -> Path:
    """A folder whose modules of these names cannot be imported."""
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "__init__.py").write_text(f"raise ImportError('{name} is not in this image')\n")
    return folder


def localised(arguments: list[str], root: Path, ports: dict[int, int]) -> list[str]:
    """The arguments with loopback addresses and this machine's paths."""
    made = []
    for text in arguments:
        match = FLAG_ADDRESS.match(text)
        if match:
            text = f"{match.group(1)}={LOOPBACK}:{ports[int(match.group(2))]}"
        elif text.startswith("--port="):
            text = f"--port={ports[int(text.removeprefix('--port='))]}"
        text = text.replace("--host=::", f"--host={LOOPBACK}").replace("http://jaeger:4317", "http://127.0.0.1:1")
        made.append(text.replace(IMAGE_ROOT, str(root)))
    return made


@contextlib.contextmanager
def started(command_of: Callable[[str], Command], folder: Path) -> Iterator[dict[str, Child]]:
    """The services, ready, by role; stopped at the end."""
    shared = dict(zip((50051, 50052, 50053, 8000), free_ports(4)))
    children: dict[str, Child] = {}
    try:
        for role in ("target", "draft", "coordinator", "gateway"):
            arguments, variables = command_of(role)
            root = lay_out(role, folder)
            ports = {**shared, **dict(zip((50060, 9464), free_ports(2)))}
            hidden = forbid(ENGINE if role in ("coordinator", "gateway") else frozenset(), folder / f"hidden-{role}")
            own = {key: value.replace(IMAGE_ROOT, str(root)) for key, value in variables.items()}
            own |= {"PYTHONPATH": f"{hidden}:{root}", "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            children[role] = Child(role, localised(arguments, root, ports), environment=own)
        wait_all_ready(list(children.values()))
        yield children
    finally:
        stop_all(reversed(children.values()))


@pytest.mark.more
def test_a_draft_with_another_tokenizer_starts_from_its_image(tmp_path: Path) -> None:
    """Claim: the draft's image serves a mounted draft whose vocabulary is not the target's. Source: to tell the share
    of a sample text that such a draft knows it read files that no image had, and ended. Conclusive: it imports specdec
    and reads its models from the image's files only, links as links."""
    root = lay_out("draft", tmp_path)
    models = EMBEDDED_MODELS
    arguments = [f"--model={models / 'smollm2-draft'}", f"--target-tokenizer={models / 'target'}", "--port=0"]
    environment = {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    child = Child("draft", [*arguments, "--device=cpu", "--threads=1"], environment=environment)
    try:
        assert child.wait_ready()
    finally:
        assert child.stop(20.0) == 0


def scaled_series() -> dict[str, str]:
    """The series that decide the numbers of targets and drafts, by service."""
    queries = {
        scaler["metadata"]["name"].removeprefix("specdec-"): scaler["spec"]["triggers"][0]["metadata"]["query"]
        for scaler in of_kind(overlay("autoscaling"), "ScaledObject")
    }
    assert queries.keys() == {"draft", "target"}
    return {role: query.removeprefix("sum(").removesuffix(")") for role, query in queries.items()}


def settings_of_child(child: Child) -> ServiceSettings:
    """The settings of a running process, by its own command line."""
    words = Path(f"/proc/{child.process.pid}/cmdline").read_bytes().decode().split("\0")
    arguments = words[words.index(child.command) + 1 : -1]
    return parse(child.command, [*arguments, "--insecure", *required(child.command)], {})


def required(role: str) -> list[str]:
    """The arguments that may have come from variables."""
    return ["--tokenizer=t"] if role == "coordinator" else ["--model=m"]


def text_over_http(address: str, asked: dict[str, Any]) -> str:
    """The text of the same request to the gateway, which is healthy."""
    assert urllib.request.urlopen(f"http://{address}/health", timeout=10).status == 200
    body = {"model": served_model(address), "prompt": "def add(a, b):", **asked}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def served_model(address: str) -> str:
    """The name of the gateway's model."""
    with urllib.request.urlopen(f"http://{address}/v1/models", timeout=10) as answer:
        name: str = json.load(answer)["data"][0]["id"]
    return name


@pytest.mark.more
@pytest.mark.parametrize("command_of", [of_kubernetes, pytest.param(of_compose, marks=pytest.mark.slow)])
def test_what_containers_run_serves(command_of: Callable[[str], Command], tmp_path: Path) -> None:
    """Claim: started as the containers are, the services find each other, are healthy by the health checks of the
    compose file, show metrics, write the same text with the draft and without, over gRPC and HTTP, and end with 0 when
    stopped."""
    check = compose()["services"]["specdec-target"]["healthcheck"]["test"]
    assert check[:2] == ["CMD", "python"]
    with started(command_of, tmp_path) as children:
        client = Client(children["coordinator"].address)
        try:
            client.wait_for_draft()
            asked = {"max_tokens": 200, "temperature": 0}
            drafted = client.generate("def add(a, b):", speculative=fixed(3, draft_wait_ms=2000), **asked)
            plain = client.generate("def add(a, b):", speculative={"policy": "POLICY_OFF"}, **asked)
        finally:
            client.close()
        assert drafted.text == plain.text == text_over_http(children["gateway"].address, asked) != ""
        assert drafted.finished.statistics.num_draft_tokens > 0
        for role in ("coordinator", "draft", "target"):
            settings = settings_of_child(children[role])
            assert settings.health_address
            script = check[3].replace("127.0.0.1:50060", settings.health_address)
            assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0, role
            with urllib.request.urlopen(f"http://{settings.metrics_address}/metrics", timeout=10) as page:
                shown = page.read().decode()
            assert "\nspecdec_serving 1.0\n" in shown, role
            assert role == "coordinator" or f"\n{scaled_series()[role]} " in shown
        for role in ("gateway", "coordinator", "draft", "target"):
            assert children[role].stop(20.0) == 0, role
