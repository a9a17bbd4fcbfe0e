"""Reads Ray's tables: the actors of a deployment, and the nodes. Nothing is started or ended here."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray._private import state as ray_state  # the only table with restarts without the dashboard
from ray.job_config import JobConfig

from specdec.errors import ConfigError

NAMESPACE = "specdec"
ACTOR_CLASS = "ServiceActor"
AUTH_MODE_VARIABLE = "RAY_AUTH_MODE"
ALIVE, DEAD = "ALIVE", "DEAD"


@dataclass(frozen=True, slots=True)
class ActorRow:
    """An actor in Ray's table; `host` is empty while it has no node."""

    role: str
    state: str
    host: str
    restarts_count: int
    pid: int


class NodesOwnPath(JobConfig):
    """A job whose actors import what their node has installed. Ray's own puts the folder that `specdec ray` was started
    in before it, and files there, such as random.py, would be run."""

    def _get_proto_job_config(self) -> Any:
        self._py_driver_sys_path.clear()
        return super()._get_proto_job_config()  # type: ignore[no-untyped-call]  # Ray has no types here


def connect(address: str | None) -> None:
    """Connects this process; `address` None: RAY_ADDRESS, or the cluster of this machine.

    Raises ConfigError. RAY_AUTH_MODE must be set: without it Ray chooses by files in the home folder, and two machines
    may choose differently.
    """
    if not os.environ.get(AUTH_MODE_VARIABLE):
        raise ConfigError(f"{AUTH_MODE_VARIABLE} is not set; it must be as on the nodes, token or disabled")
    try:
        ray.init(
            address=address or "auto",
            namespace=NAMESPACE,
            job_config=NodesOwnPath(),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"no Ray cluster at {address or 'RAY_ADDRESS'}: {first}; is `ray start` running?") from error


def actor_name(deployment: str, role: str) -> str:
    """Returns the name of an actor in Ray's NAMESPACE."""
    return f"{deployment}/{role}"


def actors_of(deployment: str) -> dict[str, ActorRow]:
    """Returns the living actors of a deployment by role, waiting and restarting ones included."""
    prefix = actor_name(deployment, "")
    found = {}
    for row in ray_state.actors().values():
        if row["Name"].startswith(prefix) and row["ActorClassName"] == ACTOR_CLASS and row["State"] != DEAD:
            actor = _row(row, row["Name"].removeprefix(prefix))
            found[actor.role] = actor
    return found


def _row(row: Mapping[str, Any], role: str) -> ActorRow:
    host = row["Address"]["IPAddress"] if row["State"] == ALIVE else ""
    return ActorRow(role, row["State"], host, row["NumRestarts"], row["Pid"])
