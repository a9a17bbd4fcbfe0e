"""Many clients of one coordinator on one event loop, each stream with the times of its tokens."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
from google.rpc import error_details_pb2, status_pb2

from specdec.rpc.process import set_startup_objects_aside
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

Result = TypeVar("Result")
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(slots=True)
class Stream:
    """One generation as its client saw it; `error` is the one that ended it."""

    requested_s: float
    token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    finished: pb.Finished | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.token_times_s[0] - self.requested_s

    def rate(self, from_s: float, to_s: float) -> float:
        """Tokens per second between two times."""
        return sum(from_s <= moment_s < to_s for moment_s in self.token_times_s) / (to_s - from_s)


async def read(
    stub: Any,
    request: pb.GenerateRequest,
    on_token: Callable[[Stream], Awaitable[None]] | None = None,
    on_started: Callable[[], None] = lambda: None,
) -> Stream:
    """Runs one generation to its end or its error; `on_started` is called once the target has its prompt before it,
    `on_token` is awaited after each message with tokens."""
    stream = Stream(time.monotonic())
    try:
        async for response in stub.Generate(request, timeout=900):
            if response.HasField("delta"):
                stream.token_ids += response.delta.token_ids
                stream.token_times_s += [time.monotonic()] * len(response.delta.token_ids)
                if on_token is not None:
                    await on_token(stream)
            elif response.HasField("started"):
                on_started()
            elif response.HasField("finished"):
                stream.finished = response.finished
    except grpc.aio.AioRpcError as error:
        stream.error = error
    stream.ended_s = time.monotonic()
    return stream


def details_of(error: grpc.RpcError) -> list[Any]:
    """The details of an error's status, packed."""
    return [
        detail
        for key, value in error.trailing_metadata() or ()
        if key == "grpc-status-details-bin"
        for detail in status_pb2.Status.FromString(value).details
    ]


def retry_after_s(error: grpc.RpcError) -> float | None:
    """The delay that an error's RetryInfo asks for; None without one."""
    for detail in details_of(error):
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(retry):
            return float(retry.retry_delay.ToMilliseconds()) / 1000
    return None


def with_stub(address: str, work: Callable[[Any], Awaitable[Result]]) -> Result:
    """Runs `work` with a stub of the coordinator on a new event loop, whose objects alone are collected meanwhile."""
    set_startup_objects_aside()

    async def run() -> Result:
        async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
            return await work(pb_grpc.CoordinatorServiceStub(channel))

    return asyncio.run(run())


def prompts(count: int, length: int, vocabulary_size: int) -> list[tuple[int, ...]]:
    """Prompts without a common prefix."""
    chance = random.Random(f"{count} prompts of {length}")
    return [tuple(chance.randrange(1, vocabulary_size) for _ in range(length)) for _ in range(count)]


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
