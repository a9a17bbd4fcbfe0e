"""Servers of all systems as processes, of which one works at a time; what they use of memory and processor time.

A peer's server is a session of its own and stopped (SIGSTOP) while another is measured: their threads spin. Ours is
left running, as its services watch each other; waiting costs it nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.environments import LLAMA_CPP, VLLM, environment
from specdec.errors import ConfigError
from specdec.launch.children import python_command
from tests.support.ports import free_port
from tests.support.processes import cpu_seconds

FOLDER = Path(__file__).resolve().parent
STARTED_S_MAX, STOPPED_S_MAX = 600.0, 20.0
SETTLE_S = 0.25  # threads spin for a while after their last work
POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `processes`: of its sessions' leaders; `address`: of its HTTP interface, or of its coordinator;
    `pipe`: the process that is asked by lines, of `transformers`."""

    processes: tuple[int, ...]
    address: str = ""
    pipe: subprocess.Popen[str] | None = None
    is_paused: bool = True

    def pause(self) -> None:
        """Stops it until it is to work."""
        self._tell(signal.SIGSTOP)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Lets it run within the `with` statement, and lets it calm down before the end."""
        self._tell(signal.SIGCONT)
        try:
            yield
            time.sleep(SETTLE_S)
        finally:
            self.pause()

    def _tell(self, number: int) -> None:
        if self.is_paused:
            for leader in self.processes:
                os.killpg(leader, number)

    def cpu_s(self) -> float:
        """Processor time that it has used."""
        total = 0.0
        for pid in self._all():
            with contextlib.suppress(OSError):
                total += cpu_seconds(pid)
        return total

    def memory_mb(self) -> float:
        """Memory that it holds; pages that its processes share count once."""
        total = 0
        for pid in self._all():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 1024

    def _all(self) -> list[int]:
        """Its processes: those of its sessions."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError, IndexError):
                    session = int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[3])
                    if session in self.processes:
                        found.append(int(entry.name))
        return found


@contextlib.contextmanager
def process(command: Sequence[str], environ: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, ended with all its children."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen(
        command, **pipes, env={**os.environ, **(environ or {})}, text=True, start_new_session=True
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGCONT)
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(STOPPED_S_MAX)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def first_line(started: subprocess.Popen[str]) -> dict[str, Any]:
    """Returns the JSON object that a process prints when it is ready. Raises ConfigError where it ends before."""
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("{"):
            told: dict[str, Any] = json.loads(line)
            return told
    raise ConfigError(f"{started.args!r} ended with {started.wait()} before it was ready")


@contextlib.contextmanager
def llama_server(
    model: Path, threads: int, slots: int, speculation: str = "", draft: Path | None = None, n_max: int = 0
) -> Iterator[Server]:
    """llama.cpp on a GGUF file. Raises ConfigError where it does not start."""
    asked = {"model": str(model), "threads": threads, "slots": slots, "positions": POSITIONS, "n_max": n_max}
    asked |= {"speculation": speculation, "draft": str(draft or "")}
    with process([str(environment(LLAMA_CPP)), str(FOLDER / "llama_serve.py"), json.dumps(asked)]) as started:
        yield Server((started.pid,), first_line(started)["address"])


@contextlib.contextmanager
def vllm_server(model: Path, threads: int, slots: int, speculation: dict[str, Any] | None = None) -> Iterator[Server]:
    """vLLM's build for CPUs on a folder in bfloat16. `speculation`: its --speculative-config. Raises ConfigError where
    it does not start."""
    port = free_port()
    python = environment(VLLM)
    flags = {"port": port, "dtype": "bfloat16", "max-model-len": POSITIONS, "max-num-seqs": slots}
    flags |= {"served-model-name": "m", "no-enable-prefix-caching": ""}
    command = [str(python.with_name("vllm")), "serve", str(model)]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value)) if part]
    command += ["--speculative-config", json.dumps(speculation)] if speculation else []
    cores = sorted(os.sched_getaffinity(0))[-threads:]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
    environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    environ |= {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    with process(command, environ) as started:
        address = f"http://127.0.0.1:{port}"
        wait_http(started, f"{address}/health")
        yield Server((started.pid,), address)


def wait_http(started: subprocess.Popen[str], address: str) -> None:
    """Waits until an address answers. Raises ConfigError where the process ends, or does not within STARTED_S_MAX."""
    late_s = time.monotonic() + STARTED_S_MAX
    while time.monotonic() < late_s:
        if started.poll() is not None:
            break
        with contextlib.suppress(OSError, urllib.error.URLError), urllib.request.urlopen(address, timeout=5):
            return
        time.sleep(0.5)
    raise ConfigError(f"{started.args!r} did not serve: exit code {started.poll()}")


@contextlib.contextmanager
def transformers_server(model: Path, threads: int, draft: Path | None = None, **generation: Any) -> Iterator[Server]:
    """`transformers` of this environment. `generation`: see `transformers_serve.py`."""
    asked = {"model": str(model), "dtype": "bfloat16", "threads": threads, "draft": str(draft or "")}
    command = python_command(str(FOLDER / "transformers_serve.py"), json.dumps(asked | {"generation": generation}))
    with process(command) as started:
        first_line(started)
        yield Server((started.pid,), pipe=started)
