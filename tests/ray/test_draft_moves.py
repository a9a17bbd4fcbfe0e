"""A link and a replica that comes back on another node: the addresses that the coordinator was given, tried in turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from specdec.config import ServiceSettings, TlsSettings
from specdec.ray.config import RaySettings
from specdec.ray.placing import draft_address
from specdec.rpc.client import open_channel
from specdec.rpc.link import Link
from specdec.rpc.server import Server
from specdec.v1 import target_service_pb2 as target_pb
from tests.support.echo_service import VERIFY, Echo

MINIMAL = TlsSettings(insecure=True)


async def until(condition: Callable[[], bool]) -> None:
    """Returns when `condition` holds; fails after 20 s."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.02)


async def test_a_draft_is_found_on_whichever_node_it_is():
    """Claim: the coordinator's address list for the draft, all nodes of its label, leads to the node where it answers,
    and after its end to the other, without a notification.

    Conclusive: the coordinator's own link and channel; two addresses of this machine on one port, and a server on the
    second, then on the first only.
    """
    second = Echo()
    server = second.server()
    port = int((await server.start()).rpartition(":")[2])
    own = RaySettings(insecure=True, target={"model": "t"}, draft={"model": "d", "port": port})
    addresses = draft_address(own, ["127.0.0.2", "127.0.0.1"])
    assert addresses == f"ipv4:127.0.0.2:{port},127.0.0.1:{port}"
    downs: list[str] = []
    link = Link(
        "the draft",
        lambda: open_channel(addresses, MINIMAL),
        VERIFY,
        target_pb.VerifyRequest,
        target_pb.VerifyResponse,
        lambda: None,
        lambda items, byte_count: None,
        downs.append,
    )
    running = asyncio.create_task(link.run())
    first = Echo()
    moved: Server | None = None
    try:
        await until(lambda: link.is_up)
        await server.stop(0.0)
        await until(lambda: bool(downs))
        moved = first.server(ServiceSettings(host="127.0.0.2", port=port))
        await moved.start()
        await until(lambda: link.is_up)
        assert second.messages and first.messages
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        if moved is not None:
            await moved.stop(0.0)
