"""The actors of a deployment: command, placement, and the service's settings once the node is known.

Values and pure functions, without calls to Ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.config import CoordinatorSettings, TargetSettings
from specdec.gateway_settings import GatewaySettings
from specdec.ray.config import Hosted, RaySettings, has_own_host
from specdec.settings import is_loopback

TARGET, DRAFT, COORDINATOR, GATEWAY = "target", "draft", "coordinator", "gateway"


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """One actor: its service, resources and node.

    `bundle`: its index in the target's group, which is on one node; absent: any node with `labels`. `rank`: of the
    target. `deployment`: the whole deployment, because a restarted actor has no other source of settings.
    """

    role: str
    command: str
    cpus: int
    gpus: int
    deployment: RaySettings
    labels: Mapping[str, str]
    bundle: int | None = None
    rank: int = 0

    @property
    def settings(self) -> Hosted:
        """The settings of the service, before its node is known."""
        return self.deployment.services[self.command]

    @property
    def follows(self) -> bool:
        """Whether it is a rank other than 0, without a port."""
        return self.rank > 0

    @property
    def wants(self) -> str:
        """The node and resources it waits for, as text."""
        if self.bundle is None:
            return f"a node with {_resources(self.gpus, self.cpus, self.labels)}"
        place = self.deployment.placement
        ranks = self.deployment.target.tensor_parallel_size
        cpus = ranks * place.target.cpus + place.coordinator_cpus
        cpus += place.gateway_cpus if self.deployment.gateway is not None else 0
        return f"one node with {_resources(ranks * place.target.gpus, cpus, place.target.labels)}"


def _resources(gpus: int, cpus: int, labels: Mapping[str, str]) -> str:
    parts = [f"{gpus} GPU{'s' * (gpus > 1)}"] if gpus else []
    parts.append(f"{cpus} CPU{'s' * (cpus > 1)}")
    parts += [f"label {key}={value}" for key, value in labels.items()]
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def plan(deployment: RaySettings) -> list[ActorSpec]:
    """Returns all actors, those of the target's group first, in the order of its bundles."""
    place, own = deployment.placement, deployment.placement.target
    ranks = range(deployment.target.tensor_parallel_size)
    actors = [
        ActorSpec(f"{TARGET}-{rank}", TARGET, own.cpus, own.gpus, deployment, own.labels, bundle=rank, rank=rank)
        for rank in ranks
    ]
    beside = ActorSpec(COORDINATOR, COORDINATOR, place.coordinator_cpus, 0, deployment, own.labels, bundle=len(ranks))
    actors.append(beside)
    if deployment.gateway is not None:
        index = len(ranks) + 1
        actors.append(ActorSpec(GATEWAY, GATEWAY, place.gateway_cpus, 0, deployment, own.labels, bundle=index))
    if deployment.draft is not None:
        actors.append(ActorSpec(DRAFT, DRAFT, place.draft.cpus, place.draft.gpus, deployment, place.draft.labels))
    return actors


def bundles(actors: Sequence[ActorSpec]) -> list[dict[str, float]]:
    """Returns the resources of each actor in the target's group."""
    own = [actor for actor in actors if actor.bundle is not None]
    return [{"CPU": actor.cpus, **({"GPU": actor.gpus} if actor.gpus else {})} for actor in own]


def reached_at(service: Hosted, node_host: str) -> str:
    """Returns HOST:PORT of a service on the node, for its clients."""
    is_local = has_own_host(service) and is_loopback(service.host)
    return joined(service.host if is_local else node_host, service.port)


def joined(host: str, port: int) -> str:
    """Returns HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def settings_on(actor: ActorSpec, node_host: str, draft_hosts: Sequence[str] = ()) -> Hosted:
    """Returns the settings of an actor's service on its node; `draft_hosts`: nodes of the draft, now or later."""
    settings = actor.settings
    changed: dict[str, object] = {} if has_own_host(settings) else {"host": node_host}
    if isinstance(settings, CoordinatorSettings):
        changed["target"] = (reached_at(actor.deployment.target, node_host),)
        changed["draft"] = draft_addresses(actor.deployment, draft_hosts)
    elif isinstance(settings, GatewaySettings):
        changed["address"] = (reached_at(actor.deployment.coordinator, node_host),)
    else:
        changed["threads"] = getattr(settings, "threads", 0) or actor.cpus
    if actor.follows:  # rank 0, on the same node, has these ports
        changed |= {"metrics_address": None, "health_address": None}
    if isinstance(settings, TargetSettings) and settings.tensor_parallel_size > 1:
        changed |= {
            "nnodes": settings.tensor_parallel_size,  # each process is one rank, with its own GPU from Ray
            "node_rank": actor.rank,
            "master_port": actor.deployment.ranks_port,
        }
    return settings.model_copy(update=changed)


def draft_addresses(deployment: RaySettings, hosts: Sequence[str]) -> tuple[str, ...]:
    """Returns the addresses of the draft on the nodes where it may be."""
    if deployment.draft is None:
        return ()
    return tuple(dict.fromkeys(reached_at(deployment.draft, host) for host in hosts))
