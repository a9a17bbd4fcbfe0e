"""Real traffic, as bytes: calls of a client and of a coordinator, recorded by a proxy that passes every message on.

A method of any kind is a stream of messages on the wire, so one handler serves all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator

import grpc

from specdec.launch.children import start
from tests.support.services import Client, Services, fixed

GENERATE = "/specdec.v1.CoordinatorService/Generate"
VERIFY, DRAFT = "/specdec.v1.TargetService/Verify", "/specdec.v1.DraftService/Draft"


class Recorder(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A proxy in front of one address. `requests`: messages towards it, by method, in order."""

    def __init__(self, address: str) -> None:
        self.requests: dict[str, list[bytes]] = defaultdict(list)
        self._behind = address

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Handles every method as a stream both ways."""
        method = details.method

        async def converse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            async def recorded() -> AsyncIterator[bytes]:
                async for data in requests:
                    self.requests[method].append(data)
                    yield data

            async with grpc.aio.insecure_channel(self._behind) as channel:
                try:
                    async for data in channel.stream_stream(method)(recorded()):
                        await context.write(data)
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))

        return grpc.stream_stream_rpc_method_handler(converse)


@contextlib.contextmanager
def recording(addresses: dict[str, str]) -> Iterator[tuple[dict[str, Recorder], dict[str, str]]]:
    """Recorders in front of addresses, by name, and their own addresses; in a thread with an event loop."""
    recorders = {name: Recorder(address) for name, address in addresses.items()}
    fronts: dict[str, str] = {}
    loop, is_up = asyncio.new_event_loop(), threading.Event()
    stopping = asyncio.Event()

    async def serve() -> None:
        servers = []
        for name, recorder in recorders.items():
            server = grpc.aio.server(handlers=(recorder,))
            fronts[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            servers.append(server)
        is_up.set()
        await stopping.wait()
        for server in servers:
            await server.stop(0.2)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="recorders", daemon=True)
    thread.start()
    is_up.wait(10)
    try:
        yield recorders, fronts
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(5)


def requests_of(positions_max: int) -> list[dict[str, object]]:
    """Arguments of generations that use every rule, most sampling parameters and both kinds of prompt. The texts are
    short, for a mutation often leaves a request valid."""
    common: dict[str, object] = {"max_tokens": 2, "ignore_eos": False}
    speculative = fixed(3, draft_window=5, draft_nodes_per_step=4, draft_wait_ms=20)
    return [
        {
            "prompt": [1, 2],
            "max_tokens": 6,
            "ignore_eos": True,
            "temperature": 0,
            "speculative": speculative,
            "cache_salt": "salt",
        },
        {"prompt": "<1><2><3>", **common, "seed": 7, "speculative": speculative, "logprobs": 2, "n": 1},
        {"prompt": [3], **common, "speculative": {**speculative, "rule": "RULE_REJECTION"}, "logprobs": 0},
        {"prompt": [1, 2], **common, "seed": 1, "stop": ["<5><5>", "<9>"], "stop_token_ids": [5], "min_tokens": 2},
        {"prompt": [4, 1], **common, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "logit_bias": {1: 1.5, 2: -3.0}},
        {"prompt": [2], **common, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5},
        {
            "prompt": [1, 2],
            **common,
            "max_tokens": 5,
            "seed": 3,
            "resume": [1, 2, 3],
            "speculative": {"policy": "POLICY_AUTO"},
        },
        {"prompt": [1, 2], "max_tokens": 2, "speculative": {"enabled": False}},
        {"prompt": [1 + i % 6 for i in range(min(2500, positions_max - 8))], **common, "speculative": speculative},
    ]


def record(services: Services, positions_max: int) -> dict[str, list[bytes]]:
    """The messages, by method, of generations through the services and a coordinator of its own."""
    assert services.draft is not None
    with recording({"target": services.target.address, "draft": services.draft.address}) as (replicas, fronts):
        settings = services.settings.model_copy(update=fronts | {"metrics_address": None})
        with start("coordinator", settings) as coordinator:
            coordinator.wait_ready()
            with recording({"coordinator": coordinator.address}) as (clients, front):
                client = Client(front["coordinator"])
                for asked in requests_of(positions_max):
                    client.generate(**asked)  # type: ignore[arg-type]  # by name
                client.close()
    return {
        method: messages
        for recorder in (*replicas.values(), *clients.values())
        for method, messages in recorder.requests.items()
    }
