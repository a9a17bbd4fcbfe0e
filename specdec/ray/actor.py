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
import threading
import time
from dataclasses import dataclass

import ray.util
from grpc_health.v1 import health_pb2

from specdec.errors import ConfigError, SpecdecError
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import KILL_GRACE_S, Child, arguments_of
from specdec.ray import cluster
from specdec.ray.config import Hosted
from specdec.ray.placing import COORDINATOR, DRAFT, ActorSpec, reached_at, settings_on
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_unary, open_channel
from specdec.settings import TlsSettings
from specdec.streams import warn

POLL_S = 0.05
FAILED_PAUSE_S = 5.0  # before a service that failed to start is restarted; until then `report` has the reason
DRAFT_LOOK_S = 5.0
HEALTH_TIMEOUT_S = 2.0
EXPLAINED_CODES = 1, 2  # exit codes of `specdec` with an error message


@dataclass(frozen=True, slots=True)
class Report:
    """The state of an actor's service. `health` is the gRPC health status, the gateway's by HTTP, or the error of the
    check; `failure` is the message of a service that failed to start; `pid` is its process, 0 without one."""

    address: str
    health: str
    failure: str
    pid: int


class ServiceActor:
    """Detached and named; Ray calls it from one thread, another thread owns its process for its whole life."""

    def __init__(self, plan: ActorSpec) -> None:
        self._plan = plan
        self._host: str = ray.util.get_node_ip_address()
        self._settings: Hosted = plan.settings
        self._child: Child | None = None
        self._draft_hosts: list[str] = []
        self._next_look_s = 0.0
        self._failure = ""
        self._is_stopping = False
        # Ray does not rerun a constructor that raises; all that may fail runs in the thread, whose end ends the actor.
        threading.Thread(target=self._live, name="service", daemon=True).start()

    def report(self) -> Report:
        """Returns the state of the service after a health check."""
        child = self._child
        address = "" if self._plan.follows else reached_at(self._settings, self._host)
        pid = child.process.pid if child is not None and child.is_running else 0
        if self._failure:
            return Report(address, "failed", self._failure, pid)
        if self._plan.follows:
            return Report("", "follows target-0" if pid else "starting", "", pid)
        if child is None or not child.address:
            return Report(address, "starting", "", pid)
        if isinstance(self._settings, GatewaySettings):
            return Report(address, http_health_of(address, self._settings.http_ssl_certfile is not None), "", pid)
        return Report(address, asyncio.run(health_of(address, self._settings)), "", pid)

    def stop(self) -> None:
        """Drains the service and ends its process; the actor stays until it is killed."""
        self._is_stopping = True
        if self._child is not None:
            self._child.stop(self._settings.drain_grace_s + KILL_GRACE_S)

    def _live(self) -> None:
        """Starts the process, waits for its end, and ends the actor."""
        try:
            self._child = self._start()
            code, reason = self._watch(self._child)
        except Exception as error:  # of Ray's tables or of the operating system; a restart resolves it
            code, reason = -1, str(error)
        if self._is_stopping:
            return
        warn(f"{self._plan.role} ended with code {code}. {reason}")
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
                self._follow_draft(child)
        except ConfigError as error:
            return child.process.wait(), str(error)
        return child.process.wait(), ""

    def _start(self) -> Child:
        if self._plan.command == COORDINATOR:
            self._draft_hosts = self._where_drafts_are()
        self._settings = settings_on(self._plan, self._host, self._draft_hosts)
        return Child(self._plan.command, arguments_of(self._settings))

    def _where_drafts_are(self) -> list[str]:
        """Returns the draft's node, then nodes where it may restart; with TLS only the first, as in its certificate."""
        draft = cluster.actors_of(self._plan.deployment.name).get(DRAFT)
        labelled = cluster.hosts_with(self._plan.deployment.placement.draft.labels)
        hosts = list(dict.fromkeys(([draft.host] if draft is not None and draft.host else []) + labelled))
        return hosts[:1] if self._settings.has_tls else hosts

    def _follow_draft(self, child: Child) -> None:
        """Drains a coordinator whose draft runs on a node unknown to it; the next coordinator gets that node."""
        if self._plan.command != COORDINATOR or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + DRAFT_LOOK_S
        try:
            draft = cluster.actors_of(self._plan.deployment.name).get(DRAFT)
        except Exception as error:  # Ray's head node failed: requests do not depend on it
            warn(f"{self._plan.role} cannot find the node of the draft: {error}")
            return
        if draft is not None and draft.host and draft.host not in self._draft_hosts:
            child.request_stop()


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
