"""What runs on the cluster: processes of services, and texts without a pause."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from specdec.ray.config import PORT_STEP
from tests.support.ports import free_ports
from tests.support.services import Client, Outcome

PATIENCE_S = 120.0  # a process that starts imports torch, on the remaining cores


def spaced_ports(count: int) -> list[int]:
    """Free ports, of which each one PORT_STEP above is free too, for the second service of a kind."""
    found: list[int] = []
    while len(found) < count:
        (port,) = free_ports(1)
        taken = {near for one in found for near in (one, one + PORT_STEP)}
        if taken.isdisjoint({port, port + PORT_STEP}):
            with contextlib.suppress(OSError), socket.create_server(("", port + PORT_STEP)):
                found.append(port)
    return found


def processes(command: str, model: Path | str) -> dict[int, list[str]]:
    """Arguments of the running service processes of this test, by pid."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().decode().split("\0") if folder.name.isdigit() else []
            if words[2:5] == ["-m", "specdec.cli", command] and any(str(model) in word for word in words):
                found[int(folder.name)] = words
    return found


def parent(pid: int) -> int:
    """The process that started it: its actor."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[1])


def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; an unreachable service does not fail it at once."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(grpc.RpcError):
            if condition():
                return
        assert time.monotonic() < deadline_s, "the condition did not come true"
        time.sleep(0.1)


def everyone(models: tuple[Path, Path]) -> dict[str, set[int]]:
    """The processes of all services, by command."""
    folders = {"target": models[0], "draft": models[1], "coordinator": models[0], "gateway": models[0]}
    return {command: set(processes(command, folder)) for command, folder in folders.items()}


@contextlib.contextmanager
def texts(clients: list[Client], expected: list[int], **asked: Any) -> Iterator[list[Outcome]]:
    """One text after the other of each client, without a pause, until the end; none may fail or differ."""
    outcomes: list[Outcome] = []
    is_over = threading.Event()

    def generate(client: Client) -> None:
        while not is_over.is_set():
            outcomes.append(client.generate(timeout_s=PATIENCE_S, **asked))

    with ThreadPoolExecutor(len(clients)) as pool:
        running = [pool.submit(generate, client) for client in clients]
        try:
            yield outcomes
        finally:
            is_over.set()
        for each in running:
            each.result()
    assert all(outcome.token_ids == expected for outcome in outcomes)
