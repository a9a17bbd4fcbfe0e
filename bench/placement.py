"""The placement of a measurement: the services on three emulated machines, pinned to cores, and a client.

Core 0 is the target's; core 1 has the coordinators, with priority, the draft, the network and the client. With fewer
than two cores all share one, and the results record it. `auto` runs on a coordinator of its own: it learns from its own
rounds, never from those of fixed variants.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from specdec.launch.children import Child
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, Services, running
from tests.support.network.machines import Network, emulated
from tests.support.processes import set_priority
from tests.support.variants import AUTO, Variant

COORDINATOR_NICE, COORDINATOR_COUNT = -10, 2
SETTLE_S = 0.2  # after a change of delay: messages under way arrive, and pings measure the new delay


@dataclass(frozen=True, slots=True)
class Placed:
    """Running services on their machines. One benchmark uses it, on the thread that made it."""

    network: Network
    services: Services
    stubs: tuple[pb_grpc.CoordinatorServiceStub, ...]  # of the coordinators, the first of which is for `auto`
    has_priority: bool

    def _place_of(self, variant: Variant) -> int:
        return 0 if variant == AUTO else len(self.stubs) - 1

    def stub_of(self, variant: Variant) -> pb_grpc.CoordinatorServiceStub:
        """Returns the stub for requests of a variant."""
        return self.stubs[self._place_of(variant)]

    def coordinator_of(self, variant: Variant) -> Child:
        """The coordinator that serves a variant."""
        return self.services.coordinators[self._place_of(variant)]

    def set_rtt(self, draft_rtt_ms: float, target_rtt_ms: float) -> None:
        """Round trips from the coordinator; services stay up."""
        self.network.set_delay("coordinator", "draft", draft_rtt_ms / 2)
        self.network.set_delay("coordinator", "target", target_rtt_ms / 2)
        time.sleep(SETTLE_S + 2.5 * draft_rtt_ms / 1e3)


def cores_of_machines() -> tuple[dict[str, tuple[int, ...]], tuple[int, ...]]:
    """Cores by machine, and those of the network and the client."""
    available = sorted(os.sched_getaffinity(0))
    first, last = (available[0],), (available[-1],)
    return {"target": first, "coordinator": last, "draft": last}, last


@contextlib.contextmanager
def placed(
    target_model: Path,
    dtype: str,
    draft_dtype: str,
    coordinator: dict[str, Any] | None = None,
    namespaces_allowed: bool = True,
    draft_model: Path = DRAFT_MODEL,
    target: dict[str, Any] | None = None,
) -> Iterator[Placed]:
    """Starts machines and services, two coordinators among them, all delays 0, and stops them at the end. The calling
    thread is the client then. `coordinator`, `target`: settings of these alone.

    Raises ConfigError with a service's own sentence when one cannot start.
    """
    cores, shared = cores_of_machines()
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(emulated(cores, shared, namespaces_allowed))
        models = (target_model, draft_model, coordinator, {"dtype": draft_dtype}, target)
        own: dict[str, Any] = {"network": network, "coordinator_count": COORDINATOR_COUNT, "threads": 1, "dtype": dtype}
        services = stack.enter_context(running(*models, **own))
        has_priority = all([set_priority(child.process.pid, COORDINATOR_NICE) for child in services.coordinators])
        stack.enter_context(network.machines["coordinator"].inside())
        channels = [stack.enter_context(grpc.insecure_channel(child.address)) for child in services.coordinators]
        yield Placed(network, services, tuple(map(pb_grpc.CoordinatorServiceStub, channels)), has_priority)


def description(place: Placed) -> dict[str, Any]:
    """Hardware and places, for tables and JSON."""
    machines = {
        name: {"address": machine.address, "cores": list(machine.cores)}
        for name, machine in place.network.machines.items()
    }
    return {
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "network": place.network.kind,
        "machines": machines,
        "coordinator_priority": place.has_priority,
    }


def processor_name() -> str:
    """As the kernel calls it."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
