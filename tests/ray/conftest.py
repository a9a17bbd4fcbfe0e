"""A Ray cluster of several nodes on this machine, and `specdec ray` as people run it: a command of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

COMMAND_TIMEOUT_S = 900  # for each of several services to start
SPECDEC_RAY = ("-m", "specdec.cli", "ray")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster: its address, that of its dashboard, and `specdec ray` on it."""

    address: str
    dashboard: str

    def command(self, *arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `specdec ray ARGUMENTS` to its end, in `folder`."""
        return run("-P", *SPECDEC_RAY, *arguments, "--ray-address", self.address, folder=folder)

    def up(self, folder: Path, deployment: dict) -> subprocess.CompletedProcess[str]:
        """`ray up` of a deployment, by a file in `folder`."""
        return self.command("up", "--config", str(write(folder, deployment)))

    def submit_up(self, folder: Path, deployment: dict) -> subprocess.CompletedProcess[str]:
        """The same through `ray job submit`, with `folder` as its working directory."""
        where = ["--address", self.dashboard, "--working-dir", str(folder)]
        asked = [*SPECDEC_RAY, "up", "--config", write(folder, deployment).name]
        return run("-m", "ray.scripts.scripts", "job", "submit", *where, "--", sys.executable, *asked)


def write(folder: Path, deployment: dict) -> Path:
    """The deployment's file."""
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(deployment), encoding="utf-8")
    return file


def run(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Python with the arguments to its end."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without CPUs, two large nodes with two GPUs each, which are numbers only, and a node with the draft's
    label."""
    pytest.importorskip("ray.dashboard.optional_deps", reason="Ray with its dashboard is not installed")
    from ray.cluster_utils import Cluster as RayCluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        before = signal.getsignal(signal.SIGTERM)  # the nodes set their own
        nodes = RayCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": True})
        try:
            for _ in range(2):
                nodes.add_node(num_cpus=4, num_gpus=2, labels={"specdec-role": "target"})
            nodes.add_node(num_cpus=2, labels={"specdec-role": "draft"})
            yield Cluster(nodes.address, f"http://{nodes.head_node.webui_url}")
        finally:
            nodes.shutdown()
            signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No address of another cluster is inherited."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert "SPECDEC_CONFIG" not in os.environ
