"""Concurrent generations, as their clients see them: tokens a second, times, gaps, sessions per step."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from bench.placement import Placed
from specdec.client.events import event_of
from specdec.client.run import Run, acceptance_of
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import heldout_prompts
from tests.support.processes import cpu_seconds
from tests.support.variants import Variant, request_of

ADAPTED_S = 2.0  # after a change of load: by then a policy has adapted
PROMPT_CHARACTERS = 200  # of a prompt: decoding is measured, not prefill


def chosen_prompts(turn: int, count: int) -> list[str]:
    """Returns the prompts of one turn."""
    prompts = [prompt[:PROMPT_CHARACTERS] for prompt in heldout_prompts().values()]
    return [prompts[(turn * count + index) % len(prompts)] for index in range(count)]


@dataclass(slots=True)
class Stream(Run):
    """One generation as its client saw it: the time of the request, times and bytes of messages of all kinds."""

    requested_s: float = field(default_factory=time.perf_counter)
    messages: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.deltas[0][0]

    @property
    def last_s(self) -> float:
        return self.deltas[-1][0]


@dataclass(frozen=True, slots=True)
class Block:
    """Streams of one variant, begun together. Times in milliseconds."""

    variant: str
    tokens_per_s: float
    first_token_ms: float
    per_token_ms: float
    gap_p99_ms: float
    step_sessions: float
    active_sessions: float
    acceptance: float
    rounds_off: float
    coordinator_us_per_token: float


async def read(stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest) -> Stream:
    """Runs one generation."""
    stream = Stream()
    async for response in stub.Generate(request, timeout=600):
        stream.messages.append((time.perf_counter(), response.ByteSize()))
        stream.take(event_of(response))
    return stream


async def run_streams(
    address: str, variant: Variant, rule: str, prompts: Sequence[str], max_tokens: int
) -> list[Stream]:
    """One stream per prompt, all at once."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        requests = [request_of(variant, rule, prompt, max_tokens) for prompt in prompts]
        return await asyncio.gather(*(read(stub, request) for request in requests))


def run_block(
    place: Placed, variant: Variant, rule: str, prompts: Sequence[str], max_tokens: int
) -> tuple[Block, list[Stream]]:
    """Runs a block. Raises grpc.RpcError."""
    coordinator = place.coordinator_of(variant)
    before_s = cpu_seconds(coordinator.process.pid)
    streams = asyncio.run(run_streams(coordinator.address, variant, rule, prompts, max_tokens))
    return block_of(variant.name, streams, cpu_seconds(coordinator.process.pid) - before_s), streams


async def jump_rate(
    address: str, variant: Variant, rule: str, prompts: Sequence[str], max_tokens: tuple[int, int]
) -> float:
    """Tokens a second of all streams from two seconds after the others joined the first, until one of the others ends.

    `max_tokens` of the first and of the others. The first has run for two seconds alone by then.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        first = asyncio.create_task(read(stub, request_of(variant, rule, prompts[0], max_tokens[0])))
        await asyncio.sleep(ADAPTED_S)
        others = [read(stub, request_of(variant, rule, prompt, max_tokens[1])) for prompt in prompts[1:]]
        jumped_s = time.perf_counter()
        joined, alone = await asyncio.gather(*others), await first
    ended_s = min(stream.last_s for stream in joined)
    deltas = [delta for stream in (*joined, alone) for delta in stream.deltas]
    return rate_between(deltas, jumped_s + ADAPTED_S, ended_s)


def rate_between(deltas: Iterable[tuple[float, int]], began_s: float, ended_s: float) -> float:
    """Tokens a second between two moments; SpecdecError where there is no time between them."""
    if ended_s <= began_s:
        raise SpecdecError("a text ended before the time that counts: give it more tokens")
    return sum(count for moment_s, count in deltas if began_s < moment_s <= ended_s) / (ended_s - began_s)


def block_of(variant: str, streams: Sequence[Stream], coordinator_cpu_s: float) -> Block:
    """Returns the measurements of streams begun together."""
    began_s, ended_s = max(stream.first_s for stream in streams), min(stream.last_s for stream in streams)
    if ended_s <= began_s:  # too few tokens for all to run together: from the first token of all to the last
        began_s, ended_s = min(stream.first_s for stream in streams), max(stream.last_s for stream in streams)
    deltas = [delta for stream in streams for delta in stream.deltas]
    tokens = sum(count for _, count in deltas)
    gaps_s = [b - a for stream in streams for (a, _), (b, _) in zip(stream.deltas, stream.deltas[1:])]
    counts = [stream.statistics for stream in streams]
    rounds = sum(own.rounds for own in counts)
    per_token_s = [stream.seconds / stream.timed_tokens for stream in streams]
    return Block(
        variant=variant,
        tokens_per_s=rate_between(deltas, began_s, ended_s),
        first_token_ms=statistics.median(stream.first_s - stream.requested_s for stream in streams) * 1e3,
        per_token_ms=statistics.median(per_token_s) * 1e3,
        gap_p99_ms=sorted(gaps_s)[int(0.99 * (len(gaps_s) - 1))] * 1e3,
        step_sessions=sum(own.step_sessions for own in counts) / rounds,
        active_sessions=sum(own.active_sessions for own in counts) / rounds,
        acceptance=acceptance_of(counts)[0],
        rounds_off=sum(own.num_rounds_off for own in counts) / rounds,
        coordinator_us_per_token=coordinator_cpu_s / tokens * 1e6,
    )
