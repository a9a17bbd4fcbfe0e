"""The health of one server (grpc.health.v1): Check returns the state of a service, Watch follows it.

The states are one snapshot. A change replaces it and wakes every watcher by an event of its own; each watcher then
writes by itself. So a client that does not read delays neither a change nor another client, and its own watch ends when
it has taken nothing for too long. The number of watches is bounded here, the size of a request where it is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial

import grpc
from grpc_health.v1 import health_pb2

from specdec.errors import CacheExhausted, SpecdecError
from specdec.rpc.delivery import Delivery
from specdec.rpc.limits import WATCH_COUNT_MAX
from specdec.rpc.parsing import parse_small
from specdec.rpc.status import abort

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Request, _Response = health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse


class Health:
    """The states of the services of one server. Used on the event loop only."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._watchers: set[asyncio.Event] = set()

    def set(self, serving: Mapping[str, bool]) -> None:
        """Replaces the states of all services, by name, and wakes the watchers; waits for none of them."""
        self._serving = dict(serving)
        for changed in self._watchers:
            changed.set()

    def handlers(self, has_watch: bool) -> grpc.GenericRpcHandler:
        """Returns the handlers for a port: Check, and Watch if `has_watch`."""
        parsed = partial(parse_small, _Request)
        methods = {"Check": grpc.unary_unary_rpc_method_handler(self._check, parsed)}
        if has_watch:
            methods["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch, parsed)
        return grpc.method_handlers_generic_handler(HEALTH_SERVICE, methods)

    def _state(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if name not in self._serving:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self._serving[name] else _Response.NOT_SERVING

    async def _check(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> bytes:
        state = self._state(request.service)
        if state == _Response.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no service has this name")
        return bytes(_Response(status=state).SerializeToString())

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        try:
            with Delivery(context) as delivery:
                await self._follow(request.service, delivery)
        except SpecdecError as error:
            await abort(context, error)

    async def _follow(self, name: str, delivery: Delivery) -> None:
        """Writes the state of a service now and after each change. Raises DeliveryStalled or CacheExhausted."""
        if len(self._watchers) >= WATCH_COUNT_MAX:
            raise CacheExhausted(f"all {WATCH_COUNT_MAX} places for health watches are taken")
        changed, sent = asyncio.Event(), None
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                state = self._state(name)
                if state != sent:
                    await delivery.write(_Response(status=state).SerializeToString())
                    sent = state
                await changed.wait()
        finally:
            self._watchers.discard(changed)
