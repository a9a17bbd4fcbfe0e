"""The actors of a deployment: commands, groups of one node, and settings; and what changes from one file to the next.

A target has a placement group: its ranks, ⌈coordinators / targets⌉ coordinators and, if there is one, a gateway, on one
node. The groups of a deployment are alike, so that another number of targets, or of coordinators in proportion, leaves
those that run in place. Values and pure functions, without calls to Ray.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec import __version__
from specdec.config import CoordinatorSettings, TargetSettings
from specdec.gateway_settings import GatewaySettings
from specdec.ray.config import PORT_STEP, Hosted, RaySettings, has_own_host
from specdec.settings import is_loopback, split_address

TARGET, DRAFT, COORDINATOR, GATEWAY = "target", "draft", "coordinator", "gateway"
FOLLOWS = "-rank-"  # in the role of a rank other than 0, after that of its target
Running = Mapping[str, "ActorSpec | None"]  # by role; None: it does not say what it is
UPDATED = DRAFT, TARGET, COORDINATOR, GATEWAY  # the order in which services are replaced


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group of one node: the CPUs and GPUs of each bundle, and labels of the node."""

    name: str
    bundles: tuple[tuple[int, int], ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """Where the services of a kind are reached: number `i` at the port + PORT_STEP · i of `host`, "": of its node."""

    command: str
    port: int
    host: str

    def address(self, index: int, node_host: str) -> str:
        """Returns HOST:PORT of the service of this number on the node."""
        return joined(self.host or node_host, self.port + PORT_STEP * index)


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """One actor: its service, resources and node. A running actor with an equal spec may stay as it is.

    `settings` lack what depends on the node. `group`: the target's, with `bundle` its place there; absent: any node
    with `labels`. `rank`: of the target. `reaches`: the kinds that a coordinator finds in Ray's table, or a gateway on
    its node; `numbers`: those of the gateway's coordinators.
    """

    deployment: str
    role: str
    command: str
    settings: Hosted
    kind: Kind
    index: int
    cpus: int
    gpus: int
    labels: Mapping[str, str]
    group: Group | None = None
    bundle: int = 0
    rank: int = 0
    reaches: tuple[Kind, ...] = ()
    numbers: tuple[int, ...] = ()
    version: str = __version__

    @property
    def follows(self) -> str:
        """The role of rank 0 if it is another rank, without a port; else empty."""
        return self.role.partition(FOLLOWS)[0] if self.rank else ""

    @property
    def unit(self) -> str:
        """What is replaced together: a target with all ranks, else one service."""
        return self.follows or self.role

    @property
    def wants(self) -> str:
        """The node and resources it waits for, as text."""
        if self.group is None:
            return f"a node with {_resources(self.gpus, self.cpus, self.labels)}"
        cpus, gpus = map(sum, zip(*self.group.bundles))
        return f"one node with {_resources(gpus, cpus, self.labels)}"

    def reached_at(self, node_host: str) -> str:
        """Returns HOST:PORT of the service on the node, for its clients; empty for a rank other than 0."""
        return "" if self.rank else self.kind.address(self.index, node_host)


def _resources(gpus: int, cpus: int, labels: Mapping[str, str]) -> str:
    parts = [f"{gpus} GPU{'s' * (gpus > 1)}"] if gpus else []
    parts.append(f"{cpus} CPU{'s' * (cpus > 1)}")
    parts += [f"label {key}={value}" for key, value in labels.items()]
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def plan(deployment: RaySettings) -> list[ActorSpec]:
    """Returns all actors: those of each target's group in the order of its bundles, then the drafts."""
    actors = [actor for index in range(deployment.placement.targets) for actor in _group_of(deployment, index)]
    if deployment.draft is not None:
        own = deployment.placement.draft
        actors += [
            _actor(deployment, DRAFT, index, own.cpus, own.gpus, own.labels)
            for index in range(deployment.placement.drafts)
        ]
    return actors


def _group_of(deployment: RaySettings, index: int) -> list[ActorSpec]:
    """Returns the actors of a target's group."""
    place, own, ranks_count = deployment.placement, deployment.placement.target, deployment.target.tensor_parallel_size
    beside_count = -(-place.coordinators // place.targets)
    bundles = [(own.cpus, own.gpus)] * ranks_count + [(place.coordinator_cpus, 0)] * beside_count
    bundles += [(place.gateway_cpus, 0)] if deployment.gateway is not None else []
    group = Group(f"{TARGET}-{index}", tuple(bundles), own.labels)
    actors = [
        replace(
            _actor(deployment, TARGET, index, own.cpus, own.gpus, own.labels),
            role=f"{TARGET}-{index}{FOLLOWS}{rank}" if rank else f"{TARGET}-{index}",
            rank=rank,
        )
        for rank in range(ranks_count)
    ]
    numbers = tuple(range(index, place.coordinators, place.targets))
    found = tuple(_kind(deployment, command) for command in (TARGET, DRAFT) if command in deployment.services)
    for number in numbers:
        beside = _actor(deployment, COORDINATOR, number, place.coordinator_cpus, 0, own.labels)
        actors.append(replace(beside, reaches=found))
    actors = [replace(actor, group=group, bundle=bundle) for bundle, actor in enumerate(actors)]
    if deployment.gateway is not None and numbers:
        gateway = _actor(deployment, GATEWAY, index, place.gateway_cpus, 0, own.labels)
        reaches = (_kind(deployment, COORDINATOR),)
        actors.append(replace(gateway, group=group, bundle=len(bundles) - 1, reaches=reaches, numbers=numbers))
    return actors


def _actor(
    deployment: RaySettings, command: str, index: int, cpus: int, gpus: int, labels: Mapping[str, str]
) -> ActorSpec:
    kind, settings = _kind(deployment, command), _numbered(deployment, command, index)
    return ActorSpec(deployment.name, f"{command}-{index}", command, settings, kind, index, cpus, gpus, labels)


def _kind(deployment: RaySettings, command: str) -> Kind:
    service = deployment.services[command]
    return Kind(command, service.port, service.host if has_own_host(service) and is_loopback(service.host) else "")


def _numbered(deployment: RaySettings, command: str, index: int) -> Hosted:
    """Returns the settings of the service of this number; its ports are PORT_STEP above those of the one before."""
    settings, step = deployment.services[command], PORT_STEP * index
    changed: dict[str, Any] = {"port": settings.port + step}
    for name in ("metrics_address", "health_address"):
        if address := getattr(settings, name, None):
            host, port = split_address(address, port_min=0)
            changed[name] = joined(host, port + step if port else 0)
    if isinstance(settings, TargetSettings) and settings.tensor_parallel_size > 1:
        changed["master_port"] = deployment.ranks_port + step
    return settings.model_copy(update=changed)


def joined(host: str, port: int) -> str:
    """Returns HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def settings_on(actor: ActorSpec, node_host: str, files: Mapping[str, str] | None = None) -> Hosted:
    """Returns the settings of an actor's service on its node; `files`: those with the addresses of the kinds that a
    coordinator finds."""
    settings = actor.settings
    changed: dict[str, Any] = {} if has_own_host(settings) else {"host": node_host}
    if isinstance(settings, CoordinatorSettings):
        changed |= {command: (f"@{file}",) for command, file in (files or {}).items()}
    elif isinstance(settings, GatewaySettings):
        changed["address"] = tuple(kind.address(index, node_host) for kind in actor.reaches for index in actor.numbers)
    else:
        changed["threads"] = getattr(settings, "threads", 0) or actor.cpus
    if actor.rank:  # rank 0, on the same node, has these ports
        changed |= {"metrics_address": None, "health_address": None}
    if isinstance(settings, TargetSettings) and settings.tensor_parallel_size > 1:
        # each process is one rank, with its own GPU from Ray
        changed |= {"nnodes": settings.tensor_parallel_size, "node_rank": actor.rank}
    return settings.model_copy(update=changed)


def addresses_of(kind: Kind, hosts: Mapping[str, str]) -> list[str]:
    """Returns the addresses of the services of a kind; `hosts`: of the node of each actor by role, "": none."""
    prefix = f"{kind.command}-"
    own = {role.removeprefix(prefix): host for role, host in hosts.items() if host and role.startswith(prefix)}
    return [kind.address(int(number), own[number]) for number in sorted_roles(own) if number.isdigit()]


def _order(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdigit() else (0, text)


@dataclass(frozen=True, slots=True)
class Changes:
    """What makes the running actors those of a file, in this order: `removed` ends, `added` is created at once, and
    each entry of `replaced` is drained, ended and created before the next one. An entry with a new group has all of
    its actors."""

    removed: tuple[str, ...]
    added: tuple[ActorSpec, ...]
    replaced: tuple[tuple[ActorSpec, ...], ...]


def changes(wanted: Sequence[ActorSpec], running: Running) -> Changes:
    """Returns the changes from the running actors by role; None: one that does not say what it is: it is replaced."""
    roles = {actor.role for actor in wanted}
    left = {role: spec for role, spec in running.items() if role in roles}
    units: dict[str, list[ActorSpec]] = {}
    for actor in wanted:
        group = actor.group
        units.setdefault(actor.unit if group is None or is_there(group, left) else group.name, []).append(actor)
    changed = [tuple(unit) for unit in units.values() if any(running.get(actor.role) != actor for actor in unit)]
    ended = [ended_for(unit, left) for unit in changed]
    names = {spec.group.name for spec in left.values() if spec is not None and spec.group is not None}

    def order(unit: tuple[ActorSpec, ...]) -> tuple[int, bool]:  # further groups come first: they take from others
        return UPDATED.index(unit[0].command), unit[0].group is not None and unit[0].group.name in names

    return Changes(
        tuple(role for role in running if role not in roles),
        tuple(actor for unit, roles in zip(changed, ended) if not roles for actor in unit),
        tuple(sorted((unit for unit, roles in zip(changed, ended) if roles), key=order)),
    )


def is_there(group: Group, running: Running) -> bool:
    """Whether a running actor is in this very group."""
    return any(spec is not None and spec.group == group for spec in running.values())


def ended_for(unit: Sequence[ActorSpec], running: Running) -> set[str]:
    """Returns the roles of the running actors that end before those of a unit are created: the same roles, what has
    their places in the group, and all of another group of that name."""
    roles, group = {actor.role for actor in unit} & running.keys(), unit[0].group
    if group is None:
        return roles
    inside = {role: one for role, one in running.items() if one and one.group and one.group.name == group.name}
    places = {actor.bundle for actor in unit}
    is_kept = is_there(group, running)
    return roles | {role for role, one in inside.items() if not is_kept or one.bundle in places}


def sorted_roles(roles: Iterable[str]) -> list[str]:
    """Returns roles by kind and number."""
    return sorted(roles, key=lambda role: [_order(part) for part in role.split("-")])
