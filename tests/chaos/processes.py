"""Services that are killed, frozen and started again on their port, and links between them that are cut."""

from __future__ import annotations

import contextlib
import re
import signal
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

from specdec.config import ServiceSettings, split_address
from specdec.launch.children import start
from tests.support.network.machines import Emulator

PROXY = "tests.support.network.proxy"


class Restartable:
    """A service that is started again on its port. Use it from the main thread."""

    def __init__(self, name: str, command: str, settings: ServiceSettings) -> None:
        self.name = name
        self._command = command
        self._settings = settings
        self.child = start(command, settings)

    def wait_ready(self) -> str:
        """Returns its address once it serves."""
        address = self.child.wait_ready()
        self._settings = self._settings.model_copy(update={"port": split_address(address)[1]})
        return address

    @property
    def address(self) -> str:
        return self.child.address

    @property
    def pid(self) -> int:
        return self.child.process.pid

    @property
    def metrics_address(self) -> str | None:
        return self._settings.metrics_address

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        self.child.signal(signal.SIGKILL)
        self.child.stop(0.0)

    def restart(self) -> None:
        """Starts it again and waits until it serves."""
        self.child = start(self._command, self._settings)
        self.child.wait_ready()

    def freeze(self, for_s: float) -> None:
        """SIGSTOP for this time."""
        freeze([self], for_s)

    def stop(self) -> None:
        self.child.signal(signal.SIGCONT)
        self.child.stop()


class Link:
    """A connection that can be cut: what the other side sends does not arrive, and no error says so. `delay_ms`: of
    every byte, one way."""

    def __init__(self, address: str, delay_ms: float = 0.0) -> None:
        self._proxy = Emulator(PROXY, ["--to", address, "--delay", f"{delay_ms:g}"], ())
        self.address = self._proxy.ready.split()[1]

    def begin_cut(self) -> None:
        """No byte passes from now on."""
        self._proxy.signal(signal.SIGSTOP)

    def end_cut(self) -> None:
        """All that were sent pass, and those that follow; idempotent."""
        self._proxy.signal(signal.SIGCONT)

    def drop(self) -> None:
        """Ends all connections, with what is under way; new ones are possible at once."""
        self._proxy.order("close")

    def cut(self, for_s: float) -> None:
        """No byte passes for this time, then all that were sent."""
        self.begin_cut()
        try:
            time.sleep(for_s)
        finally:
            self.end_cut()

    def stop(self) -> None:
        self._proxy.stop()


def freeze(services: Iterable[Restartable], for_s: float) -> None:
    """SIGSTOP of all, SIGCONT after this time."""
    frozen = list(services)
    for service in frozen:
        service.child.signal(signal.SIGSTOP)
    try:
        time.sleep(for_s)
    finally:
        for service in frozen:
            service.child.signal(signal.SIGCONT)


def memory_bytes(pid: int, name: str) -> int:
    """A line of the kernel's account of a process: `VmRSS` now, `VmHWM` at its peak, `RssAnon` without mapped files."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
    return 1024 * int(kilobytes)


def anonymous_mb(pid: int) -> float:
    """Memory a process has for itself alone, in MB: without mapped files such as weights and libraries."""
    return memory_bytes(pid, "RssAnon") / 1e6


@contextlib.contextmanager
def peak_of(pid: int) -> Iterator[list[float]]:
    """Gives the growth of a process, in bytes: its peak meanwhile, as the kernel notes it, over its size before."""
    held: list[float] = []
    before = memory_bytes(pid, "VmRSS")
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins at the present size
    yield held
    held.append(max(0, memory_bytes(pid, "VmHWM") - before))


def thread_count(pid: int) -> int:
    """Threads without those of gRPC's pool, of which it starts further ones on a busy machine."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the pool ends idle ones
            count += (task / "comm").read_text().strip() != "event_engine"
    return count


def descriptor_count(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def metric_values(metrics_address: str, name: str) -> float:
    """The sum of a metric over its labels, from the page of a service."""
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    pattern = re.compile(rf"{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)")
    return sum(float(match[1]) for line in lines if (match := pattern.match(line)))
