"""Coordinators, and one text from them: one `Generate` and its resumptions as one sequence of messages.

A request goes to the coordinator with the fewest requests of this gateway. A stream that is lost after its start goes
on at any coordinator with the same model and numerics, from the tokens that came and the seed or rule in force; its
reader sees a pause.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from grpc_health.v1 import health_pb2

from specdec.client.merging import merged
from specdec.client.request import Request
from specdec.client.stream import METHOD, Choices, Continuation, so_far
from specdec.errors import CacheExhausted, DeliveryStalled, Mismatch, ReplicaUnavailable, SpecdecError
from specdec.gateway.metrics import GatewayMetrics
from specdec.gateway_settings import GatewaySettings
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_stream, call_unary, open_channel
from specdec.telemetry.logs import get_logger
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

SERVICE = "specdec.v1.CoordinatorService"
DESCRIBE_METHOD = f"/{SERVICE}/Describe"
LOOK_S = 1.0  # between looks at a coordinator
LOOK_TIMEOUT_S = 5.0
RETRY_S = 1.0
MESSAGE_BYTES_MAX = 16 << 20
Response = coordinator_pb.GenerateResponse
Metadata = Sequence[tuple[str, str]]


class Coordinator:
    """One coordinator: its channel, what it last said of itself, and the requests of this gateway that it runs.

    `description` is None while it cannot take requests, for `reason`.
    """

    def __init__(self, address: str, settings: GatewaySettings, fingerprint: str) -> None:
        self.address = address
        self.running_count = 0
        self.description: coordinator_pb.CoordinatorDescribeResponse | None = None
        self.reason = f"{address} has not answered yet"
        self.has_other_tokenizer = False
        self._fingerprint = fingerprint
        self.channel = open_channel(address, settings, MESSAGE_BYTES_MAX)
        self._asked = asyncio.Event()

    async def follow(self, changed: asyncio.Event) -> None:
        """Looks at it again and again; `changed` is set at every look."""
        while True:
            await self._look()
            changed.set()
            self._asked.clear()
            try:
                await asyncio.wait_for(self._asked.wait(), LOOK_S if self.description is not None else LOOK_S / 5)
            except TimeoutError:
                pass

    def lost(self, error: SpecdecError) -> None:
        """Takes no further requests until it was looked at again, soon."""
        self.description, self.reason = None, f"{self.address}: {error}"
        self._asked.set()

    async def _look(self) -> None:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            health = await call_unary(
                self.channel, HEALTH_CHECK_METHOD, request, health_pb2.HealthCheckResponse, LOOK_TIMEOUT_S
            )
            if health.status != health_pb2.HealthCheckResponse.SERVING:
                raise ReplicaUnavailable("it does not serve: no target, or it stops")
            described = await call_unary(
                self.channel,
                DESCRIBE_METHOD,
                types_pb.DescribeRequest(),
                coordinator_pb.CoordinatorDescribeResponse,
                LOOK_TIMEOUT_S,
            )
            if not described.HasField("target"):
                raise ReplicaUnavailable("it has no target")
            self.has_other_tokenizer = described.target.tokenizer_fingerprint != self._fingerprint
            if self.has_other_tokenizer:
                raise Mismatch(f"its target {described.target.model_name} has another tokenizer than --model")
        except SpecdecError as error:
            if self.description is not None or self.has_other_tokenizer:
                get_logger().warning("coordinator lost", address=self.address, error=str(error))
            self.description, self.reason = None, f"{self.address}: {error}"
        else:
            self.description, self.reason = described, ""


class Coordinators:
    """All coordinators of a gateway."""

    def __init__(self, settings: GatewaySettings, fingerprint: str, metrics: GatewayMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self.members = [Coordinator(address, settings, fingerprint) for address in settings.address]
        self.changed = asyncio.Event()
        self._following = [asyncio.create_task(member.follow(self.changed)) for member in self.members]

    async def close(self) -> None:
        """Ends all connections."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await asyncio.gather(*(member.channel.close() for member in self.members))

    @property
    def reason(self) -> str:
        """Why no coordinator takes requests."""
        return "; ".join(member.reason for member in self.members if member.description is None)

    @property
    def description(self) -> coordinator_pb.CoordinatorDescribeResponse:
        """What a coordinator that takes requests says of itself. Raises ReplicaUnavailable when none does."""
        for member in self.members:
            if member.description is not None:
                return member.description
        raise ReplicaUnavailable(f"no coordinator takes requests: {self.reason}")

    async def until_usable(self) -> None:
        """Returns when a coordinator takes requests. Raises Mismatch for one whose target has another tokenizer."""
        while not any(member.description for member in self.members):
            if any(member.has_other_tokenizer for member in self.members):
                raise Mismatch(self.reason)
            self.changed.clear()
            await self.changed.wait()

    def _choose(self, started: coordinator_pb.Started | None, tried: set[str]) -> Coordinator | None:
        """Returns the coordinator with the fewest requests; for a text that has started one with its model."""

        def distance(member: Coordinator) -> tuple[bool, int]:
            models = [] if member.description is None else member.description.targets
            is_equal = started is None or any(own.numerics == started.numerics for own in models)
            return not is_equal, member.running_count

        def fits(member: Coordinator) -> bool:
            if member.description is None or member.address in tried:
                return False
            digests = {own.model_digest for own in member.description.targets}
            return started is None or started.model_digest in digests

        return min(filter(fits, self.members), key=distance, default=None)

    async def messages(
        self, request: Request, sums_statistics: bool, metadata: Metadata = ()
    ) -> AsyncGenerator[Response, None]:
        """Yields the messages of one text, one `started` among them. Close it to cancel the request.

        Before the start a coordinator that is full or lost is passed over for the next; afterwards the text, of several
        choices each that has not ended, is resumed for --resume-timeout-s from its last token on. Raises the
        coordinator's SpecdecError, TimeoutError after --request-timeout-s. `sums_statistics`: as for `Continuation`.
        """
        text = so_far(request, sums_statistics)
        end_s = time.monotonic() + self._settings.request_timeout_s
        async with aclosing(self._messages(text, end_s, metadata)) as responses:
            async for response in responses:
                yield response

    async def _messages(
        self, text: Continuation | Choices, end_s: float, metadata: Metadata
    ) -> AsyncGenerator[Response, None]:
        lost_s: float | None = None
        tried: set[str] = set()
        while True:
            member = self._choose(text.started, tried)
            error: SpecdecError
            if member is None:
                error = ReplicaUnavailable(f"no coordinator takes requests: {self.reason}")
            else:
                count = max(1, text.request.sampling.n)
                member.running_count += count
                try:
                    left_s = max(0.0, end_s - time.monotonic())
                    answers = call_stream(member.channel, METHOD, text.request, Response, left_s, metadata)
                    async with aclosing(answers):
                        async for response in answers:
                            if response.HasField("delta"):
                                lost_s = None
                            if text.take(response):
                                yield response
                            if response.HasField("finished") and text.is_over:
                                return
                    error = ReplicaUnavailable("the stream ended before the text")
                except (ReplicaUnavailable, CacheExhausted, DeliveryStalled) as caught:
                    error = caught
                finally:
                    member.running_count -= count
            now_s = time.monotonic()
            if now_s >= end_s:
                raise TimeoutError from error
            if member is not None:
                tried.add(member.address)
                if isinstance(error, ReplicaUnavailable):
                    member.lost(error)
            if isinstance(text, Choices) and text.may_resume:
                self._metrics.retried(True)
                rest = [self._messages(one, end_s, metadata) for one in text.unfinished()]
                async with aclosing(merged(rest)) as responses:
                    async for _, response in responses:
                        yield response
                return
            if self._choose(text.started, tried) is not None:
                self._metrics.retried(text.may_resume)
                continue
            if not text.may_resume:
                raise error
            lost_s = now_s if lost_s is None else lost_s
            wait_s = float(getattr(error, "retry_after_s", 0.0) or RETRY_S)
            if now_s + wait_s > min(lost_s + self._settings.resume_timeout_s, end_s):
                raise error
            tried.clear()
            await asyncio.sleep(wait_s)
            self._metrics.retried(True)
