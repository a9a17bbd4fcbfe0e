"""Emulated machines for benchmarks and tests: where a process of each runs, and the network between them.

`emulated(...)` gives network namespaces joined by the hub where that is possible, and otherwise processes on loopback
that reach each other through delay proxies. Either way a delay is changed while everything runs. What is run on the
machines is not known here. Start processes from the main thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.errors import ConfigError
from tests.support.network import namespaces
from tests.support.processes import cpu_seconds, module_command

LOOPBACK = "127.0.0.1"
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Where one emulated machine's processes run: an address, cores (none: all), and a namespace if it has one."""

    name: str
    address: str
    cores: tuple[int, ...]
    namespace: str | None

    @property
    def run_prefix(self) -> list[str]:
        """Returns the prefix of a command that runs it on this machine."""
        pinned = ["taskset", "-c", ",".join(map(str, self.cores))] if self.cores else []
        return [*(namespaces.run_prefix(self.namespace) if self.namespace else []), *pinned]

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is on this machine; so are threads, sockets and processes begun meanwhile."""
        before = os.sched_getaffinity(0)
        with namespaces.inside(self.namespace) if self.namespace else contextlib.nullcontext():
            os.sched_setaffinity(0, self.cores or before)
            try:
                yield
            finally:
                os.sched_setaffinity(0, before)


class Network(Protocol):
    """The machines by name, and what can be done to the network between them."""

    @property
    def kind(self) -> str:
        """The kind of emulation in words."""

    @property
    def machines(self) -> Mapping[str, Machine]:
        """All of them, by name."""

    def set_delay(self, first: str, second: str, one_way_ms: float) -> None:
        """In force for all that is sent after the call, both ways alike, on connections that exist too."""

    def address_from(self, source: str, destination: str, address: str) -> str:
        """Where a process on `source` reaches what listens at `address` on `destination`."""

    def cut(self) -> None:
        """Stops all traffic from now on; connections stay open without an error."""

    def heal(self) -> None:
        """Resumes the traffic, with the data sent meanwhile."""

    def cpu_seconds(self) -> float:
        """CPU time the emulation itself has used so far."""


class Emulator:
    """A hub or proxy process, steered by lines."""

    def __init__(self, module: str, arguments: Sequence[str], cores: Sequence[int]) -> None:
        """Starts it and waits for READY. ConfigError when it ends instead; its own sentence is on standard error."""
        self._process = subprocess.Popen(
            module_command(module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        try:
            if cores:
                os.sched_setaffinity(self.pid, cores)
            self.ready = self._line_beginning("READY")
        except BaseException:
            self.stop()
            raise

    def order(self, line: str) -> None:
        """Has a line carried out. ValueError when it is refused."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._line_beginning("OK", "REFUSED")
        if answer.startswith("REFUSED"):
            raise ValueError(answer.removeprefix("REFUSED "))

    def _line_beginning(self, *words: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(words):
                return line.strip()
        raise ConfigError(f"the network emulation ended with code {self._process.wait()}")

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Ends it, frozen or not, and waits until it has cleaned up."""
        self._process.terminate()
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


class HubNetwork:
    """Machines that are network namespaces, joined by one hub."""

    kind = "network namespaces joined by a hub"

    def __init__(self, cores: Mapping[str, Sequence[int]], own_cores: Sequence[int]) -> None:
        addresses = {name: f"10.231.0.{number}" for number, name in enumerate(cores, 1)}
        nodes = [argument for name, address in addresses.items() for argument in ("--node", f"{name}={address}")]
        self._hub = Emulator(namespaces.OWNER_MODULE, nodes, own_cores)
        self.machines = {
            name: Machine(name, addresses[name], tuple(own), namespaces.namespace_of(self._hub.pid, name))
            for name, own in cores.items()
        }

    def set_delay(self, first: str, second: str, one_way_ms: float) -> None:
        self._hub.order(f"{first}:{second}={one_way_ms:.6f}")

    def address_from(self, source: str, destination: str, address: str) -> str:
        return address

    def cut(self) -> None:
        self._hub.signal(signal.SIGSTOP)

    def heal(self) -> None:
        self._hub.signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._hub.pid)

    def stop(self) -> None:
        self._hub.stop()


class ProxyNetwork:
    """Machines that are cores of this one; a proxy stands before each address one of them reaches on another."""

    kind = "delay proxies on loopback"

    def __init__(self, cores: Mapping[str, Sequence[int]], own_cores: Sequence[int]) -> None:
        self.machines = {name: Machine(name, LOOPBACK, tuple(own), None) for name, own in cores.items()}
        self._own_cores = own_cores
        self._delays_ms: dict[frozenset[str], float] = {}
        self._proxies: dict[tuple[frozenset[str], str], Emulator] = {}

    def set_delay(self, first: str, second: str, one_way_ms: float) -> None:
        pair = self._pair(first, second)
        self._delays_ms[pair] = one_way_ms
        for (own, _), proxy in self._proxies.items():
            if own == pair:
                proxy.order(f"{one_way_ms:.6f}")

    def address_from(self, source: str, destination: str, address: str) -> str:
        pair = self._pair(source, destination)
        if (pair, address) not in self._proxies:
            delay = f"{self._delays_ms.get(pair, 0.0):.6f}"
            arguments = ["--to", address, "--delay", delay]
            self._proxies[pair, address] = Emulator("tests.support.network.proxy", arguments, self._own_cores)
        return self._proxies[pair, address].ready.split()[1]

    def _pair(self, first: str, second: str) -> frozenset[str]:
        for name in (first, second):
            if name not in self.machines:
                raise ValueError(f"{name!r} is none of {', '.join(self.machines)}")
        return frozenset((first, second))

    def cut(self) -> None:
        for proxy in self._proxies.values():
            proxy.signal(signal.SIGSTOP)

    def heal(self) -> None:
        for proxy in self._proxies.values():
            proxy.signal(signal.SIGCONT)

    def cpu_seconds(self) -> float:
        return sum(cpu_seconds(proxy.pid) for proxy in self._proxies.values())

    def stop(self) -> None:
        for proxy in self._proxies.values():
            proxy.stop()


@contextlib.contextmanager
def emulated(
    cores: Mapping[str, Sequence[int]], own_cores: Sequence[int] = (), namespaces_allowed: bool = True
) -> Iterator[Network]:
    """Machines by name with their cores, all delays 0; removed at the end, whatever happens.

    `own_cores`: where the emulation itself runs. Namespaces where they can be made and are allowed, proxies otherwise:
    `kind` says which.
    """
    is_possible = namespaces_allowed and not namespaces.why_unusable()
    network: HubNetwork | ProxyNetwork = (HubNetwork if is_possible else ProxyNetwork)(cores, own_cores)
    try:
        yield network
    finally:
        network.stop()
