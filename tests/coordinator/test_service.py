"""The order in which the coordinator admits a request, without sockets: target, slot, then the request's content."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest

from specdec.config import CoordinatorSettings
from specdec.coordinator import service
from specdec.coordinator.discovery import Member
from specdec.coordinator.service import Coordinator
from specdec.coordinator.tokenizer import Tokenizer
from specdec.errors import CacheExhausted, InvalidRequest
from specdec.folders import EMBEDDED_MODELS
from specdec.protocol.limits import DELTA_TOKEN_COUNT_MAX
from specdec.protocol.report import Delta, Finished, Statistics
from specdec.protocol.types import Description, FinishReason, TokenKind
from specdec.telemetry.tracing import Tracing
from specdec.v1 import coordinator_service_pb2 as pb

TARGET = Description("digest", "print", "name", 7, 100, (1,), "float32", "cpu", "torch")
TOO_MANY = pb.GenerateRequest(token_ids={"ids": [1]}, sampling={"stop": ["x"] * 17})


class Call:
    """What a handler sees of its call."""

    def invocation_metadata(self) -> tuple:
        return ()


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    """A coordinator of one slot with a target that is up, without any connection."""
    settings = CoordinatorSettings(target=("localhost:1",), tokenizer="none", max_num_seqs=1)
    coordinator = Coordinator(settings, Tokenizer(str(EMBEDDED_MODELS / "target")), Tracing(), lambda: None)
    coordinator.fleet.targets.update([Member("localhost:1")])
    coordinator.fleet.targets.peers[0].found(TARGET)
    yield coordinator


async def test_a_request_without_slot_is_not_read(coordinator: Coordinator) -> None:
    """Claim: the slot is taken before a request is read: without one even a malformed request is refused for the load,
    and with one by its field (a finding by attack: six large requests, none admitted, cost 11 s and 2 GB).

    Conclusive: the same request meets both; a request read first would be refused by its field both times.
    """
    coordinator._take_places(1)
    with pytest.raises(CacheExhausted, match="places"):
        await anext(coordinator.generate(TOO_MANY, Call()))
    coordinator._free_count += 1
    with pytest.raises(InvalidRequest, match="sampling.stop is 17; it must be at most 16 entries"):
        await anext(coordinator.generate(TOO_MANY, Call()))
    assert coordinator._free_count == 1


async def test_a_request_is_read_beside_the_event_loop(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: reading a request, a walk over up to a model's positions, does not run on the thread of the event loop.
    Conclusive: the reader is the real one, and the thread it runs in is compared."""
    threads, real = [], service.request_from_message

    def read(*arguments):
        threads.append(threading.current_thread())
        return real(*arguments)

    monkeypatch.setattr(service, "request_from_message", read)
    with pytest.raises(InvalidRequest):
        await anext(coordinator.generate(pb.GenerateRequest(token_ids={"ids": [7]}), Call()))
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


class Ready:
    """A request whose events have all happened while its client read nothing."""

    def __init__(self, *events) -> None:
        self._events = list(events)

    generations = (None,)

    def begin(self) -> None:
        pass

    async def events(self):
        for event in self._events:
            yield 0, event

    def close(self) -> None:
        pass


async def test_a_merged_delta_leaves_in_several_messages(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: whatever was merged while a client read nothing, no message holds more tokens than the limit.
    Conclusive: the tokens of all messages are those of the one delta, in order."""
    count = 2 * DELTA_TOKEN_COUNT_MAX + 5
    merged = Delta(0, tuple(range(count)), (TokenKind.BONUS,) * count, "x" * count, (1,) * count)
    finished = Finished(FinishReason.LENGTH, "", None, 1, count, Statistics(), "")

    monkeypatch.setattr(coordinator, "_read", lambda *_: None)
    monkeypatch.setattr(coordinator, "_admit", lambda *_: (Ready(merged, finished), TARGET))
    messages = [message async for message in coordinator.generate(pb.GenerateRequest(), Call())]
    parts = [message.delta for message in messages if message.HasField("delta")]
    assert [len(part.token_ids) for part in parts] == [DELTA_TOKEN_COUNT_MAX, DELTA_TOKEN_COUNT_MAX, 5]
    assert [token for part in parts for token in part.token_ids] == list(merged.token_ids)
    assert messages[-1].HasField("finished")
