"""Ray nodes on emulated machines: each in a network namespace of its own, with a folder of its own for Ray's files.

A machine is lost by killing all its processes at once, and falls silent by stopping them. What runs on the nodes is not
known here. Root.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from specdec.errors import ConfigError
from specdec.launch.children import python_command
from tests.support.network.machines import Machine

PORT = 6379
HEAD = "head"
RAY_FOLDER = Path("/tmp/ray")  # Ray keeps what a machine has one of below it
START_TIMEOUT_S = 120.0
ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
WITH_OWN_FOLDER = 'mount --bind "$0" "$1" && shift && exec "$@"'


class RayMachines:
    """Ray on machines, with the head node on the one of that name. Close it."""

    def __init__(self, machines: Mapping[str, Machine], folder: Path) -> None:
        self._machines = machines
        self._folder = folder
        self._log = (folder / "ray.log").open("wb")
        self._begun: list[subprocess.Popen[bytes]] = []
        RAY_FOLDER.mkdir(exist_ok=True)
        for name in machines:
            (folder / name).mkdir()
        head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
        self._start(HEAD, [*head, "--num-cpus=0", "--num-gpus=0"])

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self._machines[HEAD].address}:{PORT}"

    def command(self, name: str, arguments: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on a machine, with the machine's own files of Ray."""
        own = str(self._folder / name)
        return [*self._machines[name].run_prefix, "sh", "-c", WITH_OWN_FOLDER, own, str(RAY_FOLDER), *arguments]

    def run(self, name: str, arguments: Sequence[str]) -> str:
        """Runs a `specdec` command on a machine; returns its output. Raises ConfigError if it fails."""
        command = self.command(name, python_command("-m", "specdec.cli", *arguments))
        environment = os.environ | ENVIRONMENT
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            raise ConfigError(f"specdec {' '.join(arguments)} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def add(self, name: str, cpus: int, gpus: int, role: str) -> None:
        """Starts a node on a machine; a machine may have several."""
        labels = f"--labels=specdec-role={role}"
        self._start(name, [f"--address={self.address}", f"--num-cpus={cpus}", f"--num-gpus={gpus}", labels])

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        host = self._machines[name].address
        ray = python_command("-m", "ray.scripts.scripts", "start", f"--node-ip-address={host}", *arguments)
        small = ["--object-store-memory=100000000", "--disable-usage-stats", "--block"]
        before = self._ready_count()
        process = subprocess.Popen(
            self.command(name, [*ray, *small]),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
        )
        self._begun.append(process)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._ready_count() == before:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise ConfigError(f"no Ray node on {name}: {self._text()[-2000:]}")
            time.sleep(0.1)

    def _ready_count(self) -> int:
        return self._text().count("Ray runtime started")

    def _text(self) -> str:
        return (self._folder / "ray.log").read_text(encoding="utf-8", errors="replace")

    def processes(self, name: str) -> dict[int, list[str]]:
        """The processes of a machine: their command lines by pid."""
        namespace = self._machines[name].namespace
        assert namespace is not None
        listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=True).stdout
        found = {}
        for pid in map(int, listed.split()):
            try:
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:  # it has ended since
                continue
        return found

    def kill(self, name: str) -> None:
        """The machine is lost with all that runs on it, this process excepted; until nothing is left."""
        while self._signal(name, signal.SIGKILL):
            time.sleep(0.05)
            for process in self._begun:
                process.poll()

    def freeze(self, name: str) -> None:
        """The machine falls silent: nothing on it runs any more, and its connections stay open."""
        self._signal(name, signal.SIGSTOP)

    def _signal(self, name: str, number: int) -> int:
        """Sends a signal to all that runs on a machine, this process excepted; to how many."""
        count = 0
        for pid in self.processes(name):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(pid, number)
                    count += 1
        return count

    def close(self) -> None:
        """Ends everything on all machines."""
        for name in self._machines:
            self.kill(name)
        for process in self._begun:
            process.wait()
        self._log.close()
