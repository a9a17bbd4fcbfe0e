"""A deployment on a Ray cluster: start, change, wait until it serves, status, removal.

Its name identifies it and no other state is stored, so any machine of the cluster can read, change or remove it: what
runs is what the actors say of themselves.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from specdec.errors import ConfigError
from specdec.ray.actor import Report, ServiceActor
from specdec.ray.cluster import ALIVE, NAMESPACE, ActorRow, actor_name, actors_of
from specdec.ray.placing import (
    COORDINATOR,
    DRAFT,
    GATEWAY,
    TARGET,
    ActorSpec,
    Group,
    changes,
    ended_for,
    is_there,
    sorted_roles,
)

POLL_S = 0.5
REPORT_TIMEOUT_S = 5.0
KNOWN_TIMEOUT_S = 30.0  # for the answers of all actors, before one without an answer is replaced
REMOVE_TIMEOUT_S = 60.0
SERVING = "SERVING"
FRONTS = COORDINATOR, GATEWAY  # what clients reach
DRAINED = GATEWAY, COORDINATOR, TARGET, DRAFT  # the order in which services that end together are drained
Tell = Callable[[ActorSpec, "Seen | None"], None]


@dataclass(frozen=True, slots=True)
class Seen:
    """An actor in Ray's table and its report; no report without a node or an answer."""

    row: ActorRow
    report: Report | None

    @property
    def is_serving(self) -> bool:
        return self.report is not None and self.report.health == SERVING

    @property
    def spec(self) -> ActorSpec | None:
        """What it says that it is."""
        return self.report.spec if self.report is not None else None

    @property
    def health(self) -> str:
        """The state in a few words."""
        if self.report is not None:
            return self.report.failure or self.report.health
        return "no answer" if self.row.state == ALIVE else self.row.state.lower().replace("_", " ")


def begin(actors: Sequence[ActorSpec]) -> None:
    """Creates groups and actors; returns at once, even without capacity for them."""
    groups: dict[str, PlacementGroup] = {}
    for actor in actors:
        group = actor.group
        if group is not None and group.name not in groups:
            groups[group.name] = _group(actor.deployment, group)
        _create(actor, None if group is None else groups[group.name])


def _group(deployment: str, group: Group) -> PlacementGroup:
    """Returns the placement group of this name, which is made where there is none."""
    name = actor_name(deployment, group.name)
    try:
        found: PlacementGroup = get_placement_group(name)
    except ValueError:
        found = placement_group(
            [{"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})} for cpus, gpus in group.bundles],
            strategy="STRICT_PACK",
            name=name,
            lifetime="detached",
            bundle_label_selector=[dict(group.labels)] * len(group.bundles) if group.labels else None,
        )
    return found


def _create(actor: ActorSpec, group: PlacementGroup | None) -> None:
    """Has Ray place the actor, and again after each loss."""
    where: dict[str, object]
    if group is not None:
        where = {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, actor.bundle)}
    else:
        where = {"label_selector": dict(actor.labels)} if actor.labels else {}
    ray.remote(ServiceActor).options(
        name=actor_name(actor.deployment, actor.role),
        namespace=NAMESPACE,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=actor.cpus,
        num_gpus=actor.gpus,
        **where,
    ).remote(actor)


def update(wanted: Sequence[ActorSpec], start_timeout_s: float, tell: Tell) -> dict[str, Seen]:
    """Makes the running actors of a deployment the wanted ones: ends those that are not wanted, creates new ones, and
    replaces changed ones, drained, one by one; a target with all its ranks, and with its group where that has changed.
    Returns what is seen once they serve; of a new deployment once coordinators and gateways do.

    Raises ConfigError as `wait_until_serving` does; what was changed before stays.
    """
    name = wanted[0].deployment
    known = _known(name)
    todo = changes(wanted, known)
    end(name, todo.removed)
    filled = {spec.group.name for spec in known.values() if spec is not None and spec.group is not None}
    _remove_groups(name, _groups(name) - (filled & {actor.group.name for actor in wanted if actor.group is not None}))
    begin(todo.added)
    awaited = todo.added if known else [actor for actor in todo.added if actor.command in FRONTS]
    wait_until_serving(todo.added, awaited, start_timeout_s, tell)
    for unit in todo.replaced:
        _replace(unit)
        wait_until_serving(unit, unit, start_timeout_s, tell)
    return look(name)


def _known(name: str) -> dict[str, ActorSpec | None]:
    """Returns what each actor says that it is; None for one without a node, or without an answer."""
    deadline_s = time.monotonic() + KNOWN_TIMEOUT_S
    while True:
        seen = look(name)
        if all(found.report or found.row.state != ALIVE for found in seen.values()) or time.monotonic() > deadline_s:
            return {role: found.spec for role, found in seen.items()}


def _replace(unit: Sequence[ActorSpec]) -> None:
    """Ends what runs in place of these actors, with the whole group if another is wanted, and creates them."""
    name, group = unit[0].deployment, unit[0].group
    known = _known(name)
    end(name, ended_for(unit, known))
    if group is not None and not is_there(group, known):
        _remove_groups(name, {group.name})
    begin(unit)


def look(name: str) -> dict[str, Seen]:
    """Returns every actor of the deployment by role; empty without a deployment."""
    rows = actors_of(name)
    asked: dict[str, Any] = {}
    for role, row in rows.items():
        if row.state == ALIVE and (handle := _handle(name, role)) is not None:
            asked[role] = handle.report.remote()
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=REPORT_TIMEOUT_S)
    return {role: Seen(rows[role], _answer(asked.get(role))) for role in sorted_roles(rows)}


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
    actors: Sequence[ActorSpec], awaited: Sequence[ActorSpec], timeout_s: float, tell: Tell
) -> dict[str, Seen]:
    """Returns what is seen once the awaited ones of these actors serve. Calls `tell` for an actor in a new state.

    Raises ConfigError with a service's own message when it cannot start, or with the waiting actors after the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    before: dict[str, str] = {}
    while actors:
        seen = look(actors[0].deployment)
        for actor in actors:
            found = seen.get(actor.role)
            if found is not None and found.report is not None and found.report.failure:
                raise ConfigError(f"{actor.role} on {found.row.host} cannot start: {found.report.failure}")
            state = found.health if found and found.row.host else ""
            if before.get(actor.role) != state:
                before[actor.role] = state
                tell(actor, found)
        if is_serving(seen, [actor.role for actor in awaited if not actor.follows]):
            return seen
        if time.monotonic() > deadline_s:
            waiting = [f"{actor.role} ({before.get(actor.role) or actor.wants})" for actor in actors]
            raise ConfigError(f"not serving within {timeout_s:g} s: {', '.join(waiting)}")
        time.sleep(POLL_S)
    return {}


def is_serving(seen: Mapping[str, Seen], roles: Sequence[str]) -> bool:
    """Whether the actors of these roles serve."""
    return all(role in seen and seen[role].is_serving for role in roles)


def remove(name: str) -> list[str]:
    """Ends a deployment; returns its roles. Idempotent. Raises ConfigError when Ray does not end them."""
    roles = sorted_roles(actors_of(name))
    end(name, roles)
    _remove_groups(name, _groups(name))
    return roles


def end(name: str, roles: Collection[str]) -> None:
    """Ends actors, gateways and coordinators first, each service drained; returns when none of them lives.

    Raises ConfigError when Ray does not end them.
    """
    rows = actors_of(name)
    for command in DRAINED:
        _stop(name, [role for role in roles if role.partition("-")[0] == command and is_alive(rows.get(role))])
    for role in roles:
        if (handle := _handle(name, role)) is not None:
            ray.kill(handle, no_restart=True)
    deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
    while left := [role for role in roles if role in actors_of(name)]:
        if time.monotonic() > deadline_s:
            raise ConfigError(f"{', '.join(left)} did not end within {REMOVE_TIMEOUT_S:g} s")
        time.sleep(POLL_S / 5)


def is_alive(row: ActorRow | None) -> bool:
    return row is not None and row.state == ALIVE


def _stop(name: str, roles: Sequence[str]) -> None:
    """Drains services in parallel. One that ends meanwhile has drained."""
    handles = [handle for role in roles if (handle := _handle(name, role)) is not None]
    stopping: list[Any] = [handle.stop.remote() for handle in handles]
    if stopping:
        ray.wait(stopping, num_returns=len(stopping), timeout=None)


def _groups(name: str) -> set[str]:
    """Returns the names of the deployment's placement groups."""
    prefix = actor_name(name, "")
    there = [row["name"] for row in placement_group_table().values() if row["state"] != "REMOVED"]
    return {group.removeprefix(prefix) for group in there if group.startswith(prefix)}


def _remove_groups(name: str, groups: Collection[str]) -> None:
    """Removes placement groups; returns when they are gone. Raises ConfigError when Ray does not remove them."""
    for group in groups:
        with contextlib.suppress(ValueError):  # there is none
            remove_placement_group(get_placement_group(actor_name(name, group)))
    deadline_s = time.monotonic() + REMOVE_TIMEOUT_S
    while left := _groups(name).intersection(groups):
        if time.monotonic() > deadline_s:
            raise ConfigError(f"the groups of {', '.join(sorted(left))} did not end within {REMOVE_TIMEOUT_S:g} s")
        time.sleep(POLL_S / 5)
