"""One service as an actor: a `specdec` process on the node Ray chose, and the end of this actor when that ends.

The service runs in a process of its own, started, drained and killed as everywhere else; the actor only holds it. So
there is one way to restart, Ray's: a process that ends takes its actor with it, an actor that is killed takes its
process, and Ray starts the actor again. Nothing but a few words about the service ever travels over Ray.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import dataclass

import ray.util
from grpc_health.v1 import health_pb2

from specdec.cli.processes import KILL_GRACE_S, Child, arguments_of
from specdec.errors import ConfigError, SpecdecError
from specdec.ray import cluster
from specdec.ray.placing import COORDINATOR, DRAFT, ActorPlan, reached_at, settings_on
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_unary, open_channel
from specdec.settings import ServiceSettings, TlsSettings

POLL_S = 0.05
FAILED_PAUSE_S = 5.0  # before a service that could not start is tried again; until then it can be asked why
DRAFT_LOOK_S = 5.0
HEALTH_TIMEOUT_S = 2.0
EXPLAINED_CODES = 1, 2  # what `specdec` ends with when it has said why


@dataclass(frozen=True, slots=True)
class Report:
    """What an actor says of its service. `health` is gRPC's word, or why there is none; `failure` is what a service
    said that could not start; `pid` is its process, 0 while there is none."""

    address: str
    health: str
    failure: str
    pid: int


class ServiceActor:
    """Detached and named; Ray calls it from one thread, its process belongs to another, which lives as long as it."""

    def __init__(self, plan: ActorPlan) -> None:
        self._plan = plan
        self._host: str = ray.util.get_node_ip_address()
        self._settings: ServiceSettings = plan.settings
        self._child: Child | None = None
        self._draft_hosts: list[str] = []
        self._next_look_s = 0.0
        self._failure = ""
        self._is_stopping = False
        # A constructor that raises is not run again by Ray; what may fail is in the thread, whose end is the actor's.
        threading.Thread(target=self._live, name="service", daemon=True).start()

    def report(self) -> Report:
        """How the service is, by asking it."""
        child = self._child
        address = "" if self._plan.follows else reached_at(self._settings, self._host)
        pid = child.process.pid if child is not None and child.is_running else 0
        if self._failure:
            return Report(address, "failed", self._failure, pid)
        if self._plan.follows:
            return Report("", "follows target-0" if pid else "starting", "", pid)
        if child is None or not child.address:
            return Report(address, "starting", "", pid)
        return Report(address, asyncio.run(health_of(address, self._settings)), "", pid)

    def stop(self) -> None:
        """Drains the service and ends its process; the actor stays until it is killed."""
        self._is_stopping = True
        if self._child is not None:
            self._child.stop(self._settings.drain_grace_s + KILL_GRACE_S)

    def _live(self) -> None:
        """From the start of the process to its end, and this one's."""
        try:
            self._child = self._start()
            code, reason = self._watch(self._child)
        except Exception as error:  # of Ray's tables or of the operating system; a restart is the remedy
            code, reason = -1, str(error)
        if self._is_stopping:
            return
        print(f"specdec: {self._plan.role} ended with code {code}. {reason}", file=sys.stderr, flush=True)
        if code in EXPLAINED_CODES and reason:
            self._failure = reason
            time.sleep(FAILED_PAUSE_S)
        os._exit(1)

    def _watch(self, child: Child) -> tuple[int, str]:
        """Returns when the process has ended: its code, and what it said if it was never ready."""
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
        """The draft's node first, then those it may come back on; a certificate is for one of them."""
        draft = cluster.actors_of(self._plan.deployment.name).get(DRAFT)
        labelled = cluster.hosts_with(self._plan.deployment.placement.draft.labels)
        hosts = list(dict.fromkeys(([draft.host] if draft is not None and draft.host else []) + labelled))
        return hosts[:1] if self._settings.has_tls else hosts

    def _follow_draft(self, child: Child) -> None:
        """Drains a coordinator whose draft came up where it does not look; the next one knows the node."""
        if self._plan.command != COORDINATOR or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + DRAFT_LOOK_S
        try:
            draft = cluster.actors_of(self._plan.deployment.name).get(DRAFT)
        except Exception as error:  # of Ray's head node: requests do not depend on it
            print(f"specdec: {self._plan.role} cannot ask where the draft is: {error}", file=sys.stderr, flush=True)
            return
        if draft is not None and draft.host and draft.host not in self._draft_hosts:
            child.ask_to_stop()


async def health_of(address: str, tls: TlsSettings) -> str:
    """What the service at an address says of its health; the reason where it says nothing."""
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
