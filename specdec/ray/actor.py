"""One service as an actor: a `specdec` process on the node chosen by Ray; the actor ends with the process.

The service runs in its own process, started, drained and killed as without Ray; the actor only holds it. So only Ray
restarts services: the end of a process ends its actor, a killed actor ends its process, and Ray starts the actor again.
Ray carries only short reports about the service.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import ray.util
from grpc_health.v1 import health_pb2

from specdec.errors import ConfigError, SpecdecError
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import KILL_GRACE_S, Child, arguments_of
from specdec.ray import cluster
from specdec.ray.placing import COORDINATOR, ActorSpec, addresses_of, settings_on
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_unary, open_channel
from specdec.settings import TlsSettings
from specdec.streams import warn

POLL_S = 0.05
FAILED_PAUSE_S = 5.0  # before a service that failed to start is restarted; until then `report` has the reason
LOOK_S = 1.0  # between two looks at Ray's table, for the addresses that a coordinator finds
HEALTH_TIMEOUT_S = 2.0
EXPLAINED_CODES = 1, 2  # exit codes of `specdec` with an error message


@dataclass(frozen=True, slots=True)
class Report:
    """The state of an actor's service. `health` is the gRPC health status, the gateway's by HTTP, or the error of the
    check; `failure` is the message of a service that failed to start; `pid` is its process, 0 without one."""

    spec: ActorSpec
    address: str
    health: str
    failure: str
    pid: int


class ServiceActor:
    """Detached and named; Ray calls it from one thread, another thread owns its process for its whole life."""

    def __init__(self, spec: ActorSpec) -> None:
        self._spec = spec
        self._host: str = ray.util.get_node_ip_address()
        self._child: Child | None = None
        self._found: Addresses | None = None
        self._failure = ""
        self._is_stopping = False
        # Ray does not rerun a constructor that raises; all that may fail runs in the thread, whose end ends the actor.
        threading.Thread(target=self._live, name="service", daemon=True).start()

    def report(self) -> Report:
        """Returns the state of the service after a health check."""
        child, settings = self._child, self._spec.settings
        address = self._spec.reached_at(self._host)
        pid = child.process.pid if child is not None and child.is_running else 0
        if self._failure:
            health = "failed"
        elif self._spec.follows:
            health = f"follows {self._spec.follows}" if pid else "starting"
        elif child is None or not child.address:
            health = "starting"
        elif isinstance(settings, GatewaySettings):
            health = http_health_of(address, settings.http_ssl_certfile is not None)
        else:
            health = asyncio.run(health_of(address, settings))
        return Report(self._spec, address, health, self._failure, pid)

    def stop(self) -> None:
        """Drains the service and ends its process; the actor stays until it is killed."""
        self._is_stopping = True
        if self._child is not None:
            self._child.stop(self._spec.settings.drain_grace_s + KILL_GRACE_S)

    def _live(self) -> None:
        """Starts the process, waits for its end, and ends the actor."""
        with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
            try:
                self._child = self._start(Path(folder))
                code, reason = self._watch(self._child)
            except Exception as error:  # of Ray's tables or of the operating system; a restart resolves it
                code, reason = -1, str(error)
        if self._is_stopping:
            return
        warn(f"{self._spec.role} ended with code {code}. {reason}")
        if code in EXPLAINED_CODES and reason:
            self._failure = reason
            time.sleep(FAILED_PAUSE_S)
        os._exit(1)

    def _watch(self, child: Child) -> tuple[int, str]:
        """Waits for the end of the process; returns its code, and its message if it was never ready."""
        try:
            while child.is_running:
                child.check_ready(POLL_S)
                time.sleep(POLL_S)
                if self._found is not None:
                    self._found.follow()
        except ConfigError as error:
            return child.process.wait(), str(error)
        return child.process.wait(), ""

    def _start(self, folder: Path) -> Child:
        files: dict[str, str] = {}
        if self._spec.command == COORDINATOR:
            self._found = Addresses(self._spec, folder)
            self._found.write()
            files = self._found.files
        return Child(self._spec.command, arguments_of(settings_on(self._spec, self._host, files)))


class Addresses:
    """The files with the addresses of targets and drafts that a coordinator reads, written from Ray's table."""

    def __init__(self, spec: ActorSpec, folder: Path) -> None:
        self._spec = spec
        self._written: dict[str, str] = {}
        self._next_look_s = 0.0
        self.files = {kind.command: str(folder / f"{kind.command}s") for kind in spec.reaches}

    def write(self) -> None:
        """Writes each file whose addresses have changed, by rename: a reader sees the old or the new ones."""
        hosts = {role: row.host for role, row in cluster.actors_of(self._spec.deployment).items()}
        for kind in self._spec.reaches:
            text = "".join(f"{address}\n" for address in addresses_of(kind, hosts))
            if self._written.get(kind.command) != text:
                file = Path(self.files[kind.command])
                new = file.with_suffix(".new")
                new.write_text(text, encoding="utf-8")
                new.rename(file)
                self._written[kind.command] = text

    def follow(self) -> None:
        """Writes once in LOOK_S. Where Ray's head does not answer the addresses stay: requests do not depend on it."""
        if time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        try:
            self.write()
        except Exception as error:
            self._next_look_s += FAILED_PAUSE_S
            warn(f"{self._spec.role} cannot look for targets and drafts: {error}")


async def health_of(address: str, tls: TlsSettings) -> str:
    """Returns the health status of the service at an address, or the error of the check."""
    request = health_pb2.HealthCheckRequest()
    async with open_channel(address, tls) as channel:
        try:
            answer = await call_unary(
                channel, HEALTH_CHECK_METHOD, request, health_pb2.HealthCheckResponse, HEALTH_TIMEOUT_S
            )
        except SpecdecError as error:
            return str(error)
    word: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return word


def http_health_of(address: str, has_tls: bool) -> str:
    """Returns the status of a gateway's /health in gRPC's words, or the error of the check; a certificate is not
    checked, for the gateway is the caller's own."""
    connection = http.client.HTTPConnection(address, timeout=HEALTH_TIMEOUT_S)
    if has_tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(address, timeout=HEALTH_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/health")
        return "SERVING" if connection.getresponse().status == 200 else "NOT_SERVING"
    except (OSError, http.client.HTTPException) as error:
        return str(error)
    finally:
        connection.close()
