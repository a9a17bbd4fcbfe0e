"""A link as a process of its own, to be paused or starved: it prints each report to its owner, "up" or why it is down.

Run as `python -m tests.support.link_process ADDRESS`.
"""

from __future__ import annotations

import asyncio
import sys

from specdec.config import TlsSettings
from specdec.rpc.client import open_channel
from specdec.rpc.link import Link
from specdec.v1 import target_service_pb2 as target_pb
from tests.support.echo_service import VERIFY


def say(line: str) -> None:
    print(line, flush=True)


async def main(address: str) -> None:
    """Keeps the link up until the process is killed."""
    link = Link(
        address,
        lambda: open_channel(address, TlsSettings(), is_patient=True),
        VERIFY,
        target_pb.VerifyRequest,
        target_pb.VerifyResponse,
        lambda: say("up"),
        lambda items, byte_count: None,
        say,
    )
    await link.run()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
