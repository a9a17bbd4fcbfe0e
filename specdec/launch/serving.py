"""The services of a pair on this machine, and the gateway if asked for, started in order and stopped together.

Target and draft load at the same time, their tokenizers are compared, then the coordinator starts. Whether a service
that ends is started again is known elsewhere (`specdec.launch.supervisor`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from specdec.config import ServeSettings, TlsSettings
from specdec.errors import Mismatch
from specdec.folders import local_folder
from specdec.gateway_settings import beside
from specdec.launch.children import KILL_GRACE_S, LOADING_S_MAX, Child, start, stop_all, wait_all_ready
from specdec.protocol.types import Description
from specdec.terminal import make_console

DESCRIBE_TIMEOUT_S = 10.0
INSECURE = TlsSettings(insecure=True)


@dataclass(slots=True)
class Serving:
    """Services that serve: `children` are target, draft if there is one, and coordinator, `gateways` the gateway, if
    there is one; all that are in the lists at the end are stopped. `descriptions` of "target" and "draft"."""

    children: list[Child] = field(default_factory=list)
    gateways: list[Child] = field(default_factory=list)
    descriptions: dict[str, Description] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """That of the coordinator."""
        return self.children[-1].address


@contextmanager
def running(settings: ServeSettings) -> Iterator[Serving]:
    """Yields the services once they serve, and stops them at the end. Raises SpecdecError when one cannot start, and
    Mismatch with both models unless their tokenizers are equal."""
    from specdec.engine.loading.model_folder import open_model_folder
    from specdec.rpc.ports import check_port

    check_port(settings.host, settings.port)  # before two models are loaded
    if settings.http_port is not None:
        check_port(settings.host, settings.http_port, "--http-port")
    if not local_folder(settings.model).is_dir():
        open_model_folder(settings.model)  # fetched, or its folder made, once: target and draft both read its tokenizer
    names = "target and draft" if settings.has_draft else "the target"
    serving = Serving()
    try:
        waiting = make_console(is_for_errors=True).status(f"loading {names}") if sys.stderr.isatty() else nullcontext()
        with waiting:  # shows activity, on a terminal only
            _start(settings, serving)
        yield serving
    finally:
        grace_s = settings.drain_grace_s + KILL_GRACE_S
        try:
            stop_all(serving.gateways, grace_s)
        finally:
            stop_all(reversed(serving.children), grace_s)


def _start(settings: ServeSettings, serving: Serving) -> None:
    """Starts the services; each is a child of `serving` as soon as it exists, so that `running` can stop it."""
    own = {"target": settings.target_settings(), **({"draft": settings.draft_settings()} if settings.has_draft else {})}
    for name, service in own.items():
        serving.children.append(start(name, service))
    wait_all_ready(tuple(serving.children), LOADING_S_MAX)
    addresses = {name: child.address for name, child in zip(own, serving.children)}
    serving.descriptions = asyncio.run(_described(settings, addresses))
    coordinator = settings.coordinator_settings(addresses["target"], addresses.get("draft"))
    serving.children.append(start("coordinator", coordinator))
    serving.children[-1].wait_ready()
    if settings.http_port is not None:
        serving.gateways.append(start("gateway", beside(settings, serving.address)))
        serving.gateways[-1].wait_ready()


async def _described(settings: ServeSettings, addresses: dict[str, str]) -> dict[str, Description]:
    """Returns the descriptions by name. Raises Mismatch with both models unless their tokenizers are equal."""
    from specdec.rpc.client import call_unary, open_channel
    from specdec.rpc.convert import description_from_message
    from specdec.v1 import types_pb2 as types_pb

    found: dict[str, Description] = {}
    for name, address in addresses.items():
        async with open_channel(address, INSECURE) as channel:
            method, request = f"/specdec.v1.{name.title()}Service/Describe", types_pb.DescribeRequest()
            answer = await call_unary(channel, method, request, types_pb.DescribeResponse, DESCRIBE_TIMEOUT_S)
            found[name] = description_from_message(answer)
    fingerprints = [own.tokenizer_fingerprint for own in found.values()]
    if len({*fingerprints}) > 1:
        raise Mismatch(
            f"draft {settings.draft_model} and target {settings.model} have different tokenizers (fingerprints "
            f"{fingerprints[1][:12]} and {fingerprints[0][:12]}); choose a draft with the target's tokenizer"
        )
    return found
