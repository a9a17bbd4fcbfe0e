"""A deployment on a Ray cluster: start, wait until it serves, status, removal.

Its name identifies it and no other state is stored, so any machine of the cluster can read or remove it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specdec.errors import ConfigError
from specdec.ray.actor import Report, ServiceActor
from specdec.ray.cluster import ALIVE, NAMESPACE, ActorRow, actor_name, actors_of
from specdec.ray.config import RaySettings
from specdec.ray.placing import COORDINATOR, GATEWAY, TARGET, ActorSpec, bundles, plan

POLL_S = 0.5
REPORT_TIMEOUT_S = 5.0
REMOVE_TIMEOUT_S = 60.0
SERVING = "SERVING"


@dataclass(frozen=True, slots=True)
class Seen:
    """An actor in Ray's table and its report; no report without a node or an answer."""

    row: ActorRow
    report: Report | None

    @property
    def is_serving(self) -> bool:
        return self.report is not None and self.report.health == SERVING

    @property
    def health(self) -> str:
        """The state in a few words."""
        if self.report is not None:
            return self.report.failure or self.report.health
        return "no answer" if self.row.state == ALIVE else self.row.state.lower().replace("_", " ")


def begin(deployment: RaySettings) -> list[ActorSpec]:
    """Creates the target's group and all actors; returns at once, even without capacity for them.

    Raises ConfigError if the deployment exists.
    """
    if actors_of(deployment.name):
        raise ConfigError(f"{deployment.name} is there already; specdec ray status shows it, specdec ray down ends it")
    _remove_group(deployment.name)
    actors = plan(deployment)
    own = bundles(actors)
    labels = dict(deployment.placement.target.labels)
    group = placement_group(
        own,
        strategy="STRICT_PACK",
        name=actor_name(deployment.name, TARGET),
        lifetime="detached",
        bundle_label_selector=[labels] * len(own) if labels else None,
    )
    for actor in actors:
        _create(actor, group)
    return actors


def _create(actor: ActorSpec, group: PlacementGroup) -> None:
    """Has Ray place the actor, and again after each loss."""
    where: dict[str, object]
    if actor.bundle is not None:
        where = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, actor.bundle)}
    else:
        where = {"label_selector": dict(actor.labels)} if actor.labels else {}
    ray.remote(ServiceActor).options(
        name=actor_name(actor.deployment.name, actor.role),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=actor.cpus,
        num_gpus=actor.gpus,
        **where,
    ).remote(actor)


def look(name: str) -> dict[str, Seen]:
    """Returns every actor of the deployment by role; empty without a deployment."""
    rows = actors_of(name)
    asked: dict[str, Any] = {}
    for role, row in rows.items():
        if row.state == ALIVE and (handle := _handle(name, role)) is not None:
            asked[role] = handle.report.remote()
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=REPORT_TIMEOUT_S)
    return {role: Seen(row, _answer(asked.get(role))) for role, row in sorted(rows.items())}


def _handle(name: str, role: str) -> ray.actor.ActorHandle[ServiceActor] | None:
    try:
        return ray.get_actor(actor_name(name, role), namespace=NAMESPACE)
    except ValueError:  # it has ended since
        return None


def _answer(asked: ray.ObjectRef[Report] | None) -> Report | None:
    if asked is None:
        return None
    try:
        return ray.get(asked, timeout=0)
    except ray.exceptions.RayError:  # it is late, or has just ended: the next status shows it
        return None


def wait_until_serving(
    deployment: RaySettings, actors: Sequence[ActorSpec], on_change: Callable[[ActorSpec, Seen | None], None]
) -> dict[str, Seen]:
    """Returns the actors once the coordinator, and the gateway if there is one, serves. Calls `on_change` for an
    actor in a new state.

    Raises ConfigError with a service's own message when it cannot start, or with the waiting actors after the timeout.
    """
    deadline_s = time.monotonic() + deployment.start_timeout_s
    before: dict[str, str] = {}
    while True:
        seen = look(deployment.name)
        for actor in actors:
            found = seen.get(actor.role)
            if found is not None and found.report is not None and found.report.failure:
                raise ConfigError(f"{actor.role} on {found.row.host} cannot start: {found.report.failure}")
            state = found.health if found and found.row.host else ""
            if before.get(actor.role) != state:
                before[actor.role] = state
                on_change(actor, found)
        if is_serving(seen, deployment.gateway is not None):
            return seen
        if time.monotonic() > deadline_s:
            waiting = [f"{actor.role} ({before.get(actor.role) or actor.wants})" for actor in actors]
            raise ConfigError(f"not serving within {deployment.start_timeout_s:g} s: {', '.join(waiting)}")
        time.sleep(POLL_S)


def is_serving(seen: Mapping[str, Seen], has_gateway: bool) -> bool:
    """Whether the actors that clients reach serve."""
    fronts = [COORDINATOR, GATEWAY] if has_gateway else [COORDINATOR]
    return all(role in seen and seen[role].is_serving for role in fronts)


def remove(name: str) -> list[str]:
    """Ends a deployment, the gateway and the coordinator first, each service drained; returns its roles.

    Returns when no actor lives. Idempotent. Raises ConfigError when Ray does not end them.
    """
    rows = actors_of(name)
    for roles in ([GATEWAY], [COORDINATOR], [role for role in rows if role not in (GATEWAY, COORDINATOR)]):
        _stop(name, [role for role in roles if role in rows and rows[role].state == ALIVE])
    for role in rows:
        if (handle := _handle(name, role)) is not None:
            ray.kill(handle, no_restart=True)
    _remove_group(name)
    deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
    while left := actors_of(name):
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{', '.join(left)} did not end within {REMOVE_TIMEOUT_S:g} s")
        time.sleep(POLL_S / 5)
    return sorted(rows)


def _stop(name: str, roles: Sequence[str]) -> None:
    """Drains services in parallel. One that ends meanwhile has drained."""
    handles = [handle for role in roles if (handle := _handle(name, role)) is not None]
    stopping: list[Any] = [handle.stop.remote() for handle in handles]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=None)


def _remove_group(name: str) -> None:
    try:
        group = get_placement_group(actor_name(name, TARGET))
    except ValueError:  # there is none
        return
    remove_placement_group(group)
