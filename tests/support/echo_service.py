"""A TargetService without a model: every item comes back as an ErrorItem with its session. For tests of the wire.

Run as `python -m tests.support.echo_service PORT` it is a process of its own, to be killed or frozen; it prints its
address when it listens. MUTE as second argument makes it answer the first message only, while its connection lives on.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.config import ServiceSettings
from specdec.rpc.parsing import parse
from specdec.rpc.server import Context, Server, Write, stream_stream, unary
from specdec.rpc.stamps import Stamps
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb

SERVICE = "specdec.v1.TargetService"
VERIFY, DESCRIBE = f"/{SERVICE}/Verify", f"/{SERVICE}/Describe"


async def describe(_request: types_pb.DescribeRequest, _context: Context) -> types_pb.DescribeResponse:
    return types_pb.DescribeResponse(model_name="echo")


class Echo:
    """Answers message by message; `messages` are all that came, by the number of their items."""

    def __init__(self, answer_count_max: float = float("inf")) -> None:
        self.messages: list[int] = []
        self._answer_count_max = answer_count_max

    async def verify(self, requests: AsyncIterator[bytes], write: Write, _context: Context) -> None:
        stamps = Stamps()
        async for data in requests:
            request = parse(target_pb.VerifyRequest, data)
            stamps.received(request, time.monotonic_ns())
            self.messages.append(len(request.items))
            if len(self.messages) > self._answer_count_max:
                continue
            answers = [types_pb.ErrorItem(session=item.close.session) for item in request.items]
            response = target_pb.VerifyResponse(
                items=[target_pb.VerifyResponseItem(error=answer) for answer in answers]
            )
            stamps.stamp(response, time.monotonic_ns())
            await write(response.SerializeToString())

    def server(self, settings: ServiceSettings | None = None, allowed_peers: tuple[str, ...] = ()) -> Server:
        methods = {"Verify": stream_stream(self.verify), "Describe": unary(types_pb.DescribeRequest, describe)}
        return Server(settings or ServiceSettings(port=0), {SERVICE: methods}, allowed_peers=allowed_peers)


async def main(port: int, echo: Echo) -> None:
    server = echo.server(ServiceSettings(port=port))
    print(await server.start(), flush=True)
    await asyncio.Event().wait()


@asynccontextmanager
async def listening(settings: ServiceSettings | None = None) -> AsyncIterator[str]:
    """The address of an echo service, stopped at the end."""
    server = Echo().server(settings)
    address = await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Echo(1 if sys.argv[2:] == ["MUTE"] else float("inf"))))
