"""A DraftService whose answers a test writes, for drafts that misbehave in ways no real one does; over real sockets."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable

from specdec.config import ServiceSettings
from specdec.protocol.types import PROTOCOL_VERSION
from specdec.rpc.parsing import parse
from specdec.rpc.server import Context, Server, Write, stream_stream, unary
from specdec.rpc.stamps import Stamps
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import types_pb2 as types_pb

FINGERPRINT = "0" * 64

Answers = Iterable[Iterable[draft_pb.DraftResponseItem]]


class ScriptedDraft:
    """`answers(item)` returns the messages that answer an item, each a list of items. The peers' addresses are noted:
    `stream_peers` of each stream, `describe_peers` of each description. `service` "Target": pings and a description
    only, under that service's name."""

    def __init__(
        self,
        answers: Callable[[draft_pb.DraftRequestItem], Answers] = lambda item: (),
        fingerprint: str = FINGERPRINT,
        port: int = 0,
        service: str = "Draft",
        protocol_version: int = PROTOCOL_VERSION,
    ) -> None:
        self.stream_peers: list[str] = []
        self.describe_peers: list[str] = []
        self._answers = answers
        self._fingerprint = fingerprint
        self._port = port
        self._service, self._protocol_version = service, protocol_version

    async def describe(self, _request: types_pb.DescribeRequest, context: Context) -> types_pb.DescribeResponse:
        self.describe_peers.append(context.peer())
        return types_pb.DescribeResponse(
            tokenizer_fingerprint=self._fingerprint,
            protocol_version=self._protocol_version,
            vocabulary_size=100,
            positions_max=1000,
            numerics={"tensor_parallel_size": 1},
        )

    async def draft(self, requests: AsyncIterator[bytes], write: Write, context: Context) -> None:
        self.stream_peers.append(context.peer())
        stamps = Stamps()
        async for data in requests:
            request = parse(draft_pb.DraftRequest, data)
            stamps.received(request, time.monotonic_ns())
            if not request.items:
                response = draft_pb.DraftResponse()
                stamps.stamp(response, time.monotonic_ns())
                await write(response.SerializeToString())
            for item in request.items:
                for items in self._answers(item):
                    await write(draft_pb.DraftResponse(items=items).SerializeToString())

    def server(self) -> Server:
        stream = "Draft" if self._service == "Draft" else "Verify"
        methods = {stream: stream_stream(self.draft), "Describe": unary(types_pb.DescribeRequest, self.describe)}
        return Server(ServiceSettings(port=self._port), {f"specdec.v1.{self._service}Service": methods})
