"""Space on a target that several coordinators share: texts under way wait for blocks, the oldest first, new ones are
refused. A real target process with a small cache, and two links to it, each with the sessions of a coordinator, which
opens texts that come from elsewhere with their age."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec.config import TargetSettings
from specdec.launch.children import start
from specdec.protocol.items import Close, Failure, Open, Verification, VerificationResult
from specdec.protocol.types import ResolvedSamplingParams, Rule
from specdec.rpc.client import call_unary, open_channel
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.link import Link
from specdec.settings import TlsSettings
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.services.conftest import TABLE_VOCABULARY_SIZE
from tests.support.pages import free_address, read_page
from tests.support.services import Services

BLOCK_SIZE = 16
TABLE_BYTES_PER_POSITION = 8
BLOCK_COUNT = 36
PROMPT_LENGTH = 10
OUTPUT_COUNT = 230  # 15 blocks; a text begins with five, for its run
HOUR_MS = 3_600_000


class Text:
    """One text: its tokens, when it began and ended here, what it was refused with. After `output_count` tokens it asks
    for no more; its session stays open unless that is its end."""

    def __init__(self, seed: int, age_ms: int, output_count: int = OUTPUT_COUNT) -> None:
        self.params = ResolvedSamplingParams(Rule.COUPLED, seed, PROMPT_LENGTH, temperature=1.0)
        self.prompt = tuple((seed + index) % TABLE_VOCABULARY_SIZE for index in range(PROMPT_LENGTH))
        self.tokens = list(self.prompt)
        self.output_count = output_count
        self.age_ms, self.first_s, self.ended_s = age_ms, 0.0, 0.0
        self.refusal: Failure | None = None
        self.is_over = asyncio.Event()


class Coordinator:
    """A link and its sessions, each decoded plainly to its end."""

    def __init__(self, address: str) -> None:
        self.texts: dict[int, Text] = {}
        self.link = Link(
            "the target",
            lambda: open_channel(address, TlsSettings()),
            "/specdec.v1.TargetService/Verify",
            target_pb.VerifyRequest,
            target_pb.VerifyResponse,
            lambda: None,
            self._take,
            lambda reason: None,
        )

    @asynccontextmanager
    async def linked(self) -> AsyncIterator[Coordinator]:
        task = asyncio.create_task(self.link.run())
        try:
            async with asyncio.timeout(30):
                while not self.link.is_up:
                    await asyncio.sleep(0.01)
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def open(self, *texts: Text) -> None:
        for text in texts:
            number = len(self.texts) + 1
            self.texts[number] = text
            end = PROMPT_LENGTH + OUTPUT_COUNT
            self._send(Open(number, 1, text.params, end, TABLE_VOCABULARY_SIZE, age_ms=text.age_ms))
            self._ask(number, text, text.prompt)

    def _ask(self, number: int, text: Text, suffix: Sequence[int]) -> None:
        round_index = len(text.tokens) - PROMPT_LENGTH
        self._send(Verification(number, 1, round_index, len(text.tokens), tuple(suffix)))

    def _send(self, item: Any) -> None:
        assert self.link.send(item_to_bytes(target_pb.VerifyRequest, item))

    def _take(self, messages: Sequence[Any], _byte_count: int) -> None:
        for message in messages:
            answer = item_from_message(message)
            text = self.texts[answer.session]
            if isinstance(answer, Failure):
                text.refusal = answer
                text.is_over.set()
            elif isinstance(answer, VerificationResult):
                text.first_s = text.first_s or time.monotonic()
                text.tokens += answer.output.recovered_token_ids
                if len(text.tokens) < PROMPT_LENGTH + text.output_count:
                    self._ask(answer.session, text, text.tokens[-1:])
                    continue
                text.ended_s = time.monotonic()
                text.is_over.set()
                if text.output_count == OUTPUT_COUNT:
                    self._send(Close(answer.session, 1))


async def finished(*texts: Text) -> None:
    async with asyncio.timeout(120):
        for text in texts:
            await text.is_over.wait()


@pytest.fixture
def target(table_models: tuple[Path, Path]) -> Any:
    """Address and page of a target whose cache holds two texts, and begins with seven."""
    page = free_address()
    cache = {"kv_cache_bytes": (BLOCK_COUNT + 1) * BLOCK_SIZE * TABLE_BYTES_PER_POSITION, "block_size": BLOCK_SIZE}
    common = {"port": 0, "threads": 1, "log_level": "error", "drain_grace_s": 1.0, "metrics_address": page}
    with start("target", TargetSettings(model=str(table_models[0]), **common, **cache)) as child:
        yield child.wait_ready(), page


async def test_old_texts_go_first_whichever_coordinator_they_come_from(target: tuple[str, str]) -> None:
    """Claim: of two coordinators on a cache of two texts, the eight texts under way of both are never refused
    and all end as they do alone; the two oldest, of the second coordinator, end before four of the six younger ones
    that came first: two may be in a run, for which an older one waits. New texts are refused with a delay while any
    waits, and served afterwards.

    Requirement: "a text under way waits for blocks; new ones are refused". Conclusive: eight texts begin with forty
    blocks of 36, so one waits from the start; by the order of arrival the oldest would be the last two.
    """
    address, _ = target
    async with Coordinator(address).linked() as first, Coordinator(address).linked() as second:
        young, old = [Text(seed, 1000) for seed in range(1, 7)], [Text(seed, HOUR_MS - seed) for seed in (7, 8)]
        first.open(*young)
        second.open(*old)
        while not old[1].first_s:
            await asyncio.sleep(0.001)
        new = [Text(seed, 0) for seed in (9, 10)]
        first.open(new[0])
        second.open(new[1])
        await finished(*young, *old, *new)
        for text in new:
            assert text.refusal is not None and text.refusal.reason == "CACHE_EXHAUSTED"
            assert text.refusal.retry_after_ms > 0
        assert all(text.refusal is None for text in (*young, *old)), "a text under way is not refused"
        assert sum(text.ended_s < max(own.ended_s for own in old) for text in young) <= 2
        for text in (*young, *old):
            alone = Text(text.params.seed, 0)
            second.open(alone)
            await finished(alone)
            assert alone.tokens == text.tokens


async def test_the_page_and_every_link_tell_the_same_load(target: tuple[str, str]) -> None:
    """Claim: the load on the page is that which both links are told, of the sessions of both and by pings too; cached
    prefixes without a session count as free, and without sessions it is 0. Conclusive: two sessions that ask for no
    more hold five blocks each, a share of the cache that is larger than theirs of the places."""
    address, page = target
    async with Coordinator(address).linked() as first, Coordinator(address).linked() as second:
        assert first.link.load == second.link.load == (0, 0.0)
        ended, resting = Text(1, 0), [Text(seed, 0, output_count=60) for seed in (2, 3)]
        first.open(ended)
        await finished(ended)
        first.open(resting[0])
        second.open(resting[1])
        await finished(*resting)
        counts = first.link.load_count, second.link.load_count
        async with asyncio.timeout(10):
            while first.link.load_count < counts[0] + 2 or second.link.load_count < counts[1] + 2:
                await asyncio.sleep(0.05)
        told = read_page(page).value("specdec_load", replica="target")
        assert first.link.load == second.link.load == (2, pytest.approx(told, abs=0.001))
        assert told == 10 / BLOCK_COUNT
    async with Coordinator(address).linked() as third:
        async with asyncio.timeout(10):
            while third.link.load != (0, 0.0):
                await asyncio.sleep(0.05)


async def test_every_process_has_an_instance_of_its_own(table_services: Services) -> None:
    """Claim: a replica's description names its process by 128 random bits, always the same; another process has
    another name. Conclusive: two processes, asked twice over connections of their own."""
    asked = types_pb.DescribeRequest(), types_pb.DescribeResponse, 5.0
    named: list[set[str]] = [set(), set()]
    assert table_services.draft is not None
    replicas = ("TargetService", table_services.target), ("DraftService", table_services.draft)
    for _ in range(2):
        for found, (service, child) in zip(named, replicas):
            async with open_channel(child.address, TlsSettings()) as channel:
                found.add((await call_unary(channel, f"/specdec.v1.{service}/Describe", *asked)).instance)
    (target, draft) = (found.pop() for found in named)
    assert named == [set(), set()] and target != draft
    assert all(len(bytes.fromhex(name)) == 16 for name in (target, draft))
