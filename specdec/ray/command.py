"""`specdec ray up | status | down`: a deployment on a Ray cluster, from a shell or through `ray job submit`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from specdec.cli.options import OneLineParser, UsageError
from specdec.errors import ConfigError
from specdec.ray.config import RaySettings, read_deployment
from specdec.ray.placing import COORDINATOR, FOLLOWS, GATEWAY, ActorSpec, plan
from specdec.streams import say, warn
from specdec.terminal import make_console, print_text

if TYPE_CHECKING:
    from specdec.ray.deployment import Seen

OVERVIEW = """usage: specdec ray COMMAND [FLAGS]

The services as actors of a Ray cluster: Ray places and restarts them, gRPC carries everything else.

Commands:
  up           Starts a deployment from a file, or changes a running one to it; returns when coordinators and
               gateways serve.
  status       Shows the node, address, number of restarts and health of each actor.
  down         Drains the services of a deployment and removes it.

specdec ray COMMAND --help lists the flags of a command. Set RAY_AUTH_MODE as on the cluster's nodes."""


def ray_command(arguments: Sequence[str]) -> int:
    """Runs the command named first; returns the exit code. Raises SpecdecError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print_text(OVERVIEW)
        return 0
    name, *rest = arguments
    commands: dict[str, Callable[[Sequence[str]], int]] = {"up": up, "status": status, "down": down}
    if name not in commands:
        raise UsageError(f"ray {name} is not a command; choose from {', '.join(commands)}")
    return commands[name](rest)


def _parser(command: str, summary: str, wants_file: bool) -> OneLineParser:
    parser = OneLineParser(prog=f"specdec ray {command}", description=summary, allow_abbrev=False)
    if wants_file:
        parser.add_argument("--config", metavar="FILE", required=True, help="YAML file of the deployment.")
    else:
        parser.add_argument(
            "--name", metavar="TEXT", default="specdec", help="Name of the deployment. [default: specdec]"
        )
    parser.add_argument(
        "--ray-address",
        metavar="HOST:PORT",
        help="Address of the cluster; absent: RAY_ADDRESS, or this machine's cluster.",
    )
    return parser


def _connect(address: str | None) -> None:
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        from specdec.ray import cluster
    except ModuleNotFoundError as error:
        raise ConfigError("Ray is not installed here: pip install 'specdec[ray]'") from error
    cluster.connect(address)


def up(arguments: Sequence[str]) -> int:
    """Makes what runs that of a file. An error or an interrupt removes what was started of a new deployment."""
    asked = _parser("up", "Starts a deployment, or changes a running one.", wants_file=True).parse_args(list(arguments))
    deployment = read_deployment(asked.config)
    _connect(asked.ray_address)
    from specdec.ray.deployment import look, remove, update

    began_s = time.monotonic()
    is_new = not look(deployment.name)
    try:
        seen = update(plan(deployment), deployment.start_timeout_s, lambda actor, found: _tell(began_s, actor, found))
    except BaseException:
        if is_new:
            warn("removing the started part")
            remove(deployment.name)
        else:
            warn("what has not been changed stays as it was; `specdec ray up` goes on from here")
        raise
    _tell_serving(deployment, seen, time.monotonic() - began_s)
    return 0


def _tell(began_s: float, actor: ActorSpec, found: Seen | None) -> None:
    """Prints one line about an actor whose state has changed."""
    if found is None or not found.row.host:
        words = f"waits for {actor.wants}"
    elif found.is_serving:
        words = f"serves on {found.report.address}" if found.report else ""
    else:
        words = f"{found.health} on {found.row.host}"
    say(f"{time.monotonic() - began_s:7.1f} s  {actor.role:<15} {words}")


def _tell_serving(deployment: RaySettings, seen: dict[str, Seen], took_s: float) -> None:
    addresses: dict[str, list[str]] = {COORDINATOR: [], GATEWAY: []}
    for role, found in seen.items():
        if found.is_serving and found.report is not None:
            addresses.setdefault(role.partition("-")[0], []).append(found.report.address)
    model = deployment.target.served_model_name or deployment.target.model
    say(f"specdec serves {model} on {', '.join(addresses[COORDINATOR])} after {took_s:.1f} s")
    if late := [role for role, found in seen.items() if not (found.is_serving or FOLLOWS in role)]:
        say(f"{', '.join(late)}: not serving yet; texts go on without")
    scheme = "http" if deployment.gateway is None or deployment.gateway.http_ssl_certfile is None else "https"
    for address in addresses[GATEWAY]:
        say(f"OpenAI's interface: base URL {scheme}://{address}/v1")
    flags = " --ssl-certfile … --ssl-keyfile … --ssl-ca-certs …" if deployment.coordinator.has_tls else " --insecure"
    say(f'next: specdec generate "def main():" --address {addresses[COORDINATOR][0]}{flags}')
    say(f"      specdec ray status --name {deployment.name}; specdec ray down --name {deployment.name}")


def status(arguments: Sequence[str]) -> int:
    """Prints the table; the exit code is 0 while every coordinator and gateway serves."""
    asked = _parser("status", "Shows a deployment.", wants_file=False).parse_args(list(arguments))
    _connect(asked.ray_address)
    from specdec.ray.deployment import FRONTS, is_serving, look

    seen = look(asked.name)
    if not seen:
        raise ConfigError(f"{asked.name} is not on this cluster; `specdec ray up --config FILE` starts it")
    _show(seen)
    return 0 if is_serving(seen, [role for role in seen if role.partition("-")[0] in FRONTS]) else 1


def _show(seen: dict[str, Seen]) -> None:
    from rich.table import Table

    table = Table()
    for title in ("actor", "node", "address", "restarts", "health"):
        table.add_column(title, justify="right" if title == "restarts" else "left", overflow="fold")
    for role, found in seen.items():
        address = found.report.address if found.report else ""
        table.add_row(role, found.row.host, address, str(found.row.restarts_count), found.health)
    make_console().print(table)


def down(arguments: Sequence[str]) -> int:
    """Ends the deployment; succeeds without one."""
    asked = _parser("down", "Ends a deployment.", wants_file=False).parse_args(list(arguments))
    _connect(asked.ray_address)
    from specdec.ray.deployment import remove

    ended = remove(asked.name)
    print_text(f"ended {', '.join(ended)}" if ended else f"{asked.name} is not on this cluster: nothing to end")
    return 0
