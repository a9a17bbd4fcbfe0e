"""Malformed answers on the wire: a proxy between a coordinator and a real replica passes the requests on and sends
mutations of the real answers, with them or instead of them.

An answer that the coordinator must refuse ends its link, and the next link waits for up to 2 s. So the proxy reads each
mutation as the coordinator will, and sends one that ends the link only once the link has lasted for some seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specdec.coordinator.peers import check_node_count
from specdec.coordinator.replicas import Draft, Target
from specdec.errors import SpecdecError
from specdec.launch.children import Child, start
from specdec.protocol.items import Failure
from specdec.rpc.convert_items import item_from_message
from specdec.rpc.field_count import check_large
from specdec.rpc.limits import STREAM_RESPONSE_BYTES_MAX
from specdec.rpc.link import check_item_count
from specdec.rpc.status import code_of, error_from_failure
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb
from tests.chaos.flood import Counts, without_index
from tests.chaos.mutations import Mutator
from tests.chaos.texts import Content, Reading
from tests.chaos.wire import Node, read
from tests.support.pages import free_address, read_page
from tests.support.services import Services, fixed

KINDS = {"draft-answers": Draft, "target-answers": Target}
COPIES_MAX = 64  # mutations of one real answer
REPLACED_SHARE = 0.2  # of real answers: only mutations of them are sent
REPLACED_S = 1.0  # before the end of a link, of a target: a text waits for its answer until then
DESCRIBED_SHARE = 0.5  # of descriptions, mutated
DESCRIBED_CHANGES_MAX = 128  # of one description; a link has only one
LINK_S = 0.5, 11.0  # from the start of a link to an answer that ends it; after a long one there is no pause
REFUSAL_S_MAX = 10.0  # from such an answer to the end of the link
MENDED_S_MAX = 15.0  # until texts are right again: a link's longest pause, and a busy machine
WIDTH = 32
DONOR_COUNT = 300
TEXT_S_MAX = 300.0
TOLD_LENGTH = 60  # of a failure's sentence
TARGET_FAILED = "the target failed at this generation, and its log contains the cause"
ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": [1, 2], "temperature": 0, "speculative": fixed(3)},
    {"prompt": [5], "temperature": 0, "speculative": fixed(6, draft_window=12, draft_wait_ms=0)},
    {"prompt": [2, 3], "seed": 5, "speculative": fixed(8, draft_nodes_per_step=4, draft_siblings=2), "logprobs": 2},
    {"prompt": [3], "seed": 6, "speculative": {"policy": "POLICY_AUTO", "proposers": ["PROPOSER_DRAFT"]}},
    {"prompt": [4, 1], "speculative": {**fixed(4), "rule": "RULE_REJECTION"}},
)
COMMON = {"max_tokens": 24, "ignore_eos": True}


def is_exact(asked: dict[str, Any]) -> bool:
    """Whether the text is one function of its request, whatever the draft says."""
    return "rule" not in asked["speculative"]


class Corrupter(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A proxy in front of one replica; its answers are mutated while `is_on`."""

    def __init__(self, service: str, address: str, seed: int, counts: Counts) -> None:
        self.is_on = False
        self.counts = counts
        self._service, self._kind, self._behind = service, KINDS[service], address
        self._random = random.Random(seed)
        self._links = itertools.cycle(LINK_S)
        self._donors: list[Node] = []
        descriptor: Any = self._kind.response
        self.mutator = Mutator(descriptor.DESCRIPTOR, self._donors, seed)
        self._describer = Mutator(types_pb.DescribeResponse.DESCRIPTOR, self._donors, seed + 1, DESCRIBED_CHANGES_MAX)
        self._describer.field_counts, self._describer.kind_counts = self.mutator.field_counts, self.mutator.kind_counts
        self.mutator.fields |= self._describer.fields
        self.told: set[tuple[str, str]] = set()  # code and beginning of each failure that a mutation tells of

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """Handles every method as a stream both ways."""
        method = details.method
        is_stream = method == f"/{self._kind.service}/{self._kind.stream_method}"

        async def converse(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            async with grpc.aio.insecure_channel(self._behind) as channel:
                try:
                    answers = channel.stream_stream(method)(requests)
                    await (self._stream if is_stream else self._describe)(answers, context)
                except grpc.aio.AioRpcError as error:
                    await context.abort(error.code(), error.details(), tuple(error.trailing_metadata() or ()))

        return grpc.stream_stream_rpc_method_handler(converse)

    async def _describe(self, answers: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for data in answers:
            if self.is_on and self._random.random() < DESCRIBED_SHARE:
                data = self._describer.mutate(read(types_pb.DescribeResponse.DESCRIPTOR, data))
                self.counts.answers[self._service]["description"] += 1
                self.counts.add_sent(self._service, 1)
            await context.write(data)

    async def _stream(self, answers: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        ends_s = time.monotonic() + next(self._links)
        descriptor: Any = self._kind.response
        async for data in answers:
            if not self.is_on:
                await context.write(data)
                continue
            nodes = read(descriptor.DESCRIPTOR, data)
            self._donors += (node.copy() for node in nodes if len(self._donors) < DONOR_COUNT)
            mutated = [self.mutator.mutate(nodes) for _ in range(self._random.randint(1, COPIES_MAX))]
            may_replace = self._kind is Draft or time.monotonic() > ends_s - REPLACED_S
            is_replaced = may_replace and self._random.random() < REPLACED_SHARE
            real_at = -1 if is_replaced else self._random.randrange(len(mutated))
            sent = 0
            for index, bad in enumerate(mutated):
                if index == real_at:
                    await context.write(data)
                if is_end := self._is_refused(bad):
                    if time.monotonic() < ends_s:
                        continue
                await context.write(bad)
                sent += 1
                if is_end:
                    self.counts.answers[self._service]["link ended"] += 1
                    self.counts.add_sent(self._service, sent)
                    await asyncio.sleep(REFUSAL_S_MAX)  # the end of the link cancels this
                    self.counts.add_fault(self._service, "an answer did not end its link", bad)
                    return
            self.counts.add_sent(self._service, sent)

    def _is_refused(self, data: bytes) -> bool:
        """Whether a coordinator refuses an answer, by its own functions; another exception than theirs is a fault."""
        message_class: Any = self._kind.response
        try:
            check_large(message_class, data)
            response = message_class.FromString(data)
            check_item_count(len(response.items))
            if self._kind is Draft:
                check_node_count(sum(len(item.nodes.nodes) for item in response.items))
            for message in response.items:
                item = item_from_message(message)
                if isinstance(item, Failure):
                    error = error_from_failure(item)
                    self.told.add((code_of(error).name, str(error)[:TOLD_LENGTH]))
        except (DecodeError, SpecdecError) as error:
            field = without_index(str(getattr(error, "field", "(bytes)")))
            self.counts.refused_fields[self._service][field] += 1
            return True
        except Exception as error:
            self.counts.add_fault(self._service, f"an answer raises {type(error).__name__}: {error}", data)
            return True
        return len(data) > STREAM_RESPONSE_BYTES_MAX

    def explains(self, end: End) -> bool:
        """Whether a text may end so: UNAVAILABLE, or by a failure that the target seemed to tell of; once it has
        tokens, with how to resume."""
        reason, _, how = end.details.partition("; send the request again with resume.output_token_ids")
        if end.code == "UNAVAILABLE":
            return bool(how) or not end.reading.content.token_ids
        if end.code == "INTERNAL" and reason == TARGET_FAILED:  # the sentence of the failure is in the log
            return bool(how) and any(code == end.code for code, _ in self.told)
        return (end.code, reason[:TOLD_LENGTH]) in self.told


@dataclass(slots=True)
class End:
    """The end of one generation."""

    reading: Reading
    code: str = "OK"
    details: str = ""


async def generate(stub: Any, request: pb.GenerateRequest) -> End:
    """Runs one generation to its end."""
    end = End(Reading())
    try:
        async for response in stub.Generate(request, timeout=TEXT_S_MAX):
            end.reading.take(response)
    except grpc.aio.AioRpcError as error:
        end.code, end.details = error.code().name, error.details() or ""
    except AssertionError as error:
        end.code = str(error)
    return end


class AnswerFlood:
    """Generations of a coordinator of its own whose draft, or target, is behind a Corrupter."""

    def __init__(self, service: str, services: Services, address: str, seed: int, counts: Counts) -> None:
        self.service, self._services, self._counts = service, services, counts
        self.proxy = Corrupter(service, address, seed, counts)
        self._role = KINDS[service].name
        self._requests = [services.client.request(**asked, **COMMON) for asked in ASKED]

    async def run(self, count: int) -> None:
        """Has `count` mutated answers sent, then none: the process must live and its texts be right."""
        server, port = await self._serve(0)
        address, page = f"127.0.0.1:{port}", free_address()
        settings = self._services.settings.model_copy(update={self._role: address, "metrics_address": page})
        with start("coordinator", settings) as coordinator:
            await asyncio.to_thread(coordinator.wait_ready)
            async with grpc.aio.insecure_channel(coordinator.address) as channel:
                stub = pb_grpc.CoordinatorServiceStub(channel)
                references = await self._references(stub)
                end, self.proxy.is_on = self._counts.sent[self.service] + count, True
                reading = [asyncio.create_task(self._read(coordinator, stub, references, end)) for _ in range(WIDTH)]
                await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                self.proxy.is_on = False
                await server.stop(0)  # ends the link, so that no text waits for an answer that was replaced
                server, _ = await self._serve(port)
                await asyncio.gather(*reading)
                await self._check_mended(coordinator, stub, references, page)
            self._counts.ended_count += not coordinator.is_running
        await server.stop(0)

    async def _serve(self, port: int) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(handlers=(self.proxy,), options=[("grpc.max_send_message_length", -1)])
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server, port

    async def _references(self, stub: Any) -> list[Content]:
        """The texts without speculation, undisturbed."""
        plain = [{**asked, **COMMON, "speculative": {"policy": "POLICY_OFF"}} for asked in ASKED]
        ends = [await generate(stub, self._services.client.request(**asked)) for asked in plain]
        assert all(end.reading.is_complete for end in ends), f"no reference: {ends}"
        return [end.reading.content for end in ends]

    async def _read(self, coordinator: Child, stub: Any, references: Sequence[Content], end: int) -> None:
        """Generates until enough was sent; counts ends that no answer may cause."""
        number = 0
        while self._counts.sent[self.service] < end and coordinator.is_running:
            number = (number + 1) % len(ASKED)
            found = await generate(stub, self._requests[number])
            self._counts.answers[self.service][f"text {found.code}"] += 1
            if self._role == "draft":
                self._count_text(number, found, references)
                if found.code != "OK":
                    self._counts.add_fault(self.service, f"a text ended {found.code}: {found.details}", b"")
            elif found.code != "OK" and not self.proxy.explains(found):
                self._counts.add_fault(self.service, f"a text ended {found.code}: {found.details}", b"")
            if found.code == "UNAVAILABLE":
                await asyncio.sleep(0.05)

    def _count_text(self, number: int, found: End, references: Sequence[Content]) -> None:
        if is_exact(ASKED[number]):
            self._counts.text_count += 1
            self._counts.changed_count += found.code == "OK" and found.reading.content != references[number]

    async def _check_mended(self, coordinator: Child, stub: Any, references: Sequence[Content], page: str) -> None:
        """Waits until every text is right again, and counts those that are not, and generations left."""
        deadline_s = time.monotonic() + MENDED_S_MAX
        while coordinator.is_running:
            ends = [await generate(stub, request) for request in self._requests]
            are_right = all(end.code == "OK" for end in ends)
            if are_right or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        else:
            return
        for number, found in enumerate(ends):
            self._count_text(number, found, references)
            if found.code != "OK":
                self._counts.add_fault(self.service, f"not mended: {found.code}: {found.details}", b"")
        metrics = await asyncio.to_thread(read_page, page)
        for state in ("running", "waiting"):
            if left := metrics.value(f"vllm:num_requests_{state}"):
                self._counts.add_fault(self.service, f"{left:g} generations are {state} without a client", b"")
