"""The file of `specdec ray up`: the settings of the services, and the resources and labels of their nodes.

The services' own schemas validate it before any request to Ray; unknown keys are refused. It contains no addresses: a
service listens on the address of its node.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import pydantic
from pydantic import Field, model_validator

from specdec.cli.options import UsageError, read_yaml
from specdec.config import SHARED, CoordinatorSettings, DraftSettings, TargetSettings
from specdec.gateway_settings import GatewaySettings
from specdec.settings import (
    CONNECTION,
    LIMITS,
    MODEL,
    PROCESS,
    Endpoint,
    LogLevel,
    ServiceSettings,
    Settings,
    TlsSettings,
    check_http_reach,
    setting,
)

PLACEMENT = "Placement"
DRAFT_LABELS = {"specdec-role": "draft"}
RANKS_PORT = 50054  # on loopback of the target's node
PORT_STEP = 10  # between the ports of two services of a kind: a node may have both
SECTIONS: dict[str, type[Settings]] = {
    "target": TargetSettings,
    "draft": DraftSettings,
    "coordinator": CoordinatorSettings,
    "gateway": GatewaySettings,
}
# Settings chosen by Ray, by section: refused in the file.
DECIDED = {
    "target": ("nnodes", "node_rank", "master_addr", "insecure_ranks"),
    "draft": (),
    "coordinator": ("target", "draft"),
    "gateway": ("address", "new_key"),
}
PATHS = (
    "model",
    "heads",
    "tokenizer",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "api_keys_file",
    "http_ssl_certfile",
    "http_ssl_keyfile",
)
UNPLACED = ("127.0.0.1:1",)  # stands for addresses until the actor knows its node

Labels = dict[Annotated[str, Field(min_length=1)], str]
Hosted = ServiceSettings | GatewaySettings


class ActorPlacement(Settings):
    """The resources of an actor, and the labels of its node."""

    gpus: int = setting(1, PLACEMENT, "GPUs of each rank; 0: none.", ge=0, le=1024)
    cpus: int = setting(1, PLACEMENT, "CPUs of each rank, and its threads if `threads` is 0.", ge=1, le=1024)
    labels: Labels = setting({}, PLACEMENT, "Labels a node must have (ray start --labels).")


class DraftPlacement(ActorPlacement):
    """The resources and labels of the draft."""

    labels: Labels = setting(DRAFT_LABELS, PLACEMENT, "Labels a node must have (ray start --labels).")


class Placement(Settings):
    """The numbers of services and their nodes: ranks of a target on one, with coordinators and a gateway; drafts on
    others. Coordinators are in turn beside targets."""

    targets: int = setting(1, PLACEMENT, "Number of targets.", ge=1, le=1024)
    drafts: int = setting(1, PLACEMENT, "Number of drafts, if the file has a draft.", ge=1, le=1024)
    coordinators: int = setting(1, PLACEMENT, "Number of coordinators.", ge=1, le=64)
    target: ActorPlacement = setting(ActorPlacement(), PLACEMENT, "Placement of each rank; all ranks are on one node.")
    draft: DraftPlacement = setting(DraftPlacement(), PLACEMENT, "Placement of each draft.")
    coordinator_cpus: int = setting(1, PLACEMENT, "CPUs of a coordinator, on a target's node.", ge=1, le=1024)
    gateway_cpus: int = setting(1, PLACEMENT, "CPUs of a gateway, on a target's node.", ge=1, le=1024)


class RaySettings(TlsSettings):
    """One deployment. Settings above the sections are the defaults of every service."""

    name: str = setting(
        "specdec", PROCESS, "Name of the deployment, unique on the cluster.", pattern=r"^[a-z][a-z0-9-]{0,62}$"
    )
    start_timeout_s: float = setting(
        3600.0, LIMITS, "Seconds after which `up` gives up and removes the started part.", gt=0, le=86400
    )
    log_level: LogLevel = setting("info", PROCESS, "Minimum severity of log lines.")
    drain_grace_s: float = setting(30.0, PROCESS, "Seconds for running generations to finish.", ge=0, le=86400)
    otlp_traces_endpoint: Endpoint | None = setting(None, PROCESS, "Endpoint of traces (OTLP over gRPC).")
    target: TargetSettings = setting(..., MODEL, "Settings of `specdec target`.")
    draft: DraftSettings | None = setting(None, MODEL, "Settings of `specdec draft`; absent: only the other proposers.")
    coordinator: CoordinatorSettings = setting(..., CONNECTION, "Settings of `specdec coordinator`.")
    gateway: GatewaySettings | None = setting(None, CONNECTION, "Settings of `specdec gateway`; absent: gRPC only.")
    placement: Placement = setting(Placement(), PLACEMENT, "Placement of the services.")

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Copies common settings to each section, and those of the target to the coordinator and the gateway."""
        if not isinstance(given, dict):
            return given
        values = {"coordinator": {}, **given}
        common = {name: values[name] for name in (*TlsSettings.model_fields, *sorted(SHARED)) if name in values}
        for name in SECTIONS:
            section = values.get(name)
            if not isinstance(section, dict):
                continue
            for key in DECIDED[name]:
                if key in section:
                    raise ValueError(
                        f"{name}.{key} is not allowed in the file: Ray chooses the nodes of services; leave it out"
                    )
            own = {key: value for key, value in common.items() if key in SECTIONS[name].model_fields}
            values[name] = _with_whole_paths({**own, **section})
        target, coordinator = values.get("target"), values["coordinator"]
        if isinstance(target, dict) and isinstance(coordinator, dict):
            values["coordinator"] = {"tokenizer": values["target"].get("model"), "target": UNPLACED, **coordinator}
        gateway = values.get("gateway")
        if isinstance(target, dict) and isinstance(gateway, dict):
            values["gateway"] = {"model": values["target"].get("model"), "address": UNPLACED, **gateway}
        return values

    @model_validator(mode="after")
    def _check_reach(self) -> RaySettings:
        for name, service in self.services.items():
            if has_own_host(service):
                continue
            service.check_reach("of the node", f"{name}: the address")
            if isinstance(service, GatewaySettings):
                check_http_reach("of the node", service.api_keys_file, service.insecure)
        place = self.placement
        counts = {"target": place.targets, "draft": place.drafts, "coordinator": place.coordinators}
        counts["gateway"] = min(place.targets, place.coordinators)
        first = {name: service.port for name, service in self.services.items()} | {"ranks": self.ranks_port}
        ports = [
            port + PORT_STEP * index for name, port in first.items() for index in range(counts.get(name, place.targets))
        ]
        if 0 in first.values() or len(set(ports)) < len(ports) or max(ports) > 65535:
            raise ValueError(
                f"ports are {sorted(ports)[:20]}; they must differ and be 1 to 65535: a restarted service uses the "
                f"same port, and the next of its kind that port + {PORT_STEP}"
            )
        return self

    @property
    def services(self) -> dict[str, Hosted]:
        """The settings of each configured service, by section."""
        own: dict[str, Hosted | None] = {name: getattr(self, name) for name in SECTIONS}
        return {name: service for name, service in own.items() if service is not None}

    @property
    def ranks_port(self) -> int:
        """The port where the ranks meet, on loopback of their node."""
        return self.target.master_port or RANKS_PORT


def _with_whole_paths(section: dict[str, Any]) -> dict[str, Any]:
    """Makes paths of existing files absolute: services start in other folders. Hub ids stay unchanged."""
    paths = {name: Path(str(section[name])) for name in PATHS if section.get(name)}
    return section | {name: str(path.absolute()) for name, path in paths.items() if path.exists()}


def has_own_host(service: Hosted) -> bool:
    """Whether the file has a `host` for the service."""
    return "host" in service.model_fields_set


def read_deployment(file: str) -> RaySettings:
    """Returns the settings in a file. Raises UsageError, one line, for any error."""
    content = read_yaml(file)
    try:
        return RaySettings(**{str(key): value for key, value in content.items()})
    except pydantic.ValidationError as error:
        raise UsageError(_sentence(error, file)) from None


def _sentence(error: pydantic.ValidationError, file: str) -> str:
    """Returns the first validation error as one line."""
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    name = ".".join(path)
    message = first["msg"].removeprefix("Value error, ").partition(", unable")[0]
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], _known(path[:-1]), n=1)
        hint = f"did you mean {close[0]}?" if close else f"it may hold {', '.join(_known(path[:-1]))}"
        return f"{name} in {file} is not known; {hint}"
    if first["type"] == "missing":
        return f"{name} is missing in {file}"
    if first["type"] == "value_error" and isinstance(first["input"], dict):  # of a section as a whole
        return f"{name} in {file}: {message}" if name else f"{file}: {message}"
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{name} in {file} is {shown}; {message.replace('Input should be', 'it must be')}"


def _known(path: list[str]) -> list[str]:
    """Returns the keys of the section at `path`."""
    top: dict[tuple[str, ...], type[Settings]] = {(): RaySettings, ("placement",): Placement}
    classes = top | {(name,): own for name, own in SECTIONS.items()}
    decided = DECIDED.get(path[0], ()) if path else ()
    return [name for name in classes.get(tuple(path), ActorPlacement).model_fields if name not in decided]
