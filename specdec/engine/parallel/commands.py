"""What rank 0 tells the others, as packed integers over a socket: reserve storage, copy, scrub, step, stop.

Small commands wait for the next step and travel with it: storage is only read by steps, so nobody can tell. A follower
sleeps in its socket between steps.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TypeAlias

import numpy

from specdec.engine.interface import RaggedBatch, Segment

WORD = numpy.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Stop:
    """No more steps: the ranks part in peace."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Make the storage, as `CausalModel.allocate`."""

    block_count: int
    block_size: int


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """As `Storage.copy_block`."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class Scrub:
    """As `Storage.scrub`."""

    block_id: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Step:
    """Run one forward of this batch."""

    batch: RaggedBatch


Command: TypeAlias = Stop | Allocate | CopyBlock | Scrub | Step
KINDS: tuple[type, ...] = (Stop, Allocate, CopyBlock, Scrub, Step)  # a kind's number is its place


def pack(command: Command, block_size: int = 1) -> numpy.ndarray:
    """One command as int32 words: its number, the count of its words, the words.

    Of a segment's blocks those are told that hold its positions and what lies before them.
    """
    if isinstance(command, Step):
        return _pack_step(command.batch, block_size)
    words = astuple(command)
    return numpy.array((KINDS.index(type(command)), len(words), *words), WORD)


def _pack_step(batch: RaggedBatch, block_size: int) -> numpy.ndarray:
    heads: list[int] = [len(batch.segments)]
    tails: list[Sequence[int]] = []
    for segment in batch.segments:
        block_ids = segment.block_ids[: -(-segment.end // block_size)]
        heads += (segment.start, len(segment.token_ids), len(block_ids), segment.logit_count)
        tails += (segment.token_ids, block_ids)
    words = numpy.concatenate([numpy.asarray(part, WORD) for part in (heads, *tails)])
    return numpy.concatenate((numpy.array((KINDS.index(Step), len(words)), WORD), words))


def unpack(words: numpy.ndarray) -> Iterator[Command]:
    """The commands of one message, in order."""
    place = 0
    while place < len(words):
        number, count = words[place : place + 2].tolist()
        own = words[place + 2 : place + 2 + count]
        place += 2 + count
        kind = KINDS[number]
        yield Step(_unpack_batch(own)) if kind is Step else kind(*own.tolist())


def _unpack_batch(words: numpy.ndarray) -> RaggedBatch:
    segment_count = int(words[0])
    heads = words[1 : 1 + 4 * segment_count].reshape(-1, 4).tolist()
    place = 1 + 4 * segment_count
    segments = []
    for start, token_count, block_count, logit_count in heads:
        middle, end = place + token_count, place + token_count + block_count
        segments.append(Segment(words[middle:end].tolist(), start, words[place:middle].tolist(), logit_count))
        place = end
    return RaggedBatch(tuple(segments))


class CommandSender:
    """Rank 0's end: one connection to every other rank."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        self._pending: list[numpy.ndarray] = []

    def add(self, words: numpy.ndarray) -> None:
        """Queues a command for the next message."""
        self._pending.append(words)

    def send(self, words: numpy.ndarray) -> None:
        """Sends what is queued and this command as one message. Raises OSError when a rank is gone."""
        message = numpy.concatenate((*self._pending, words))
        self._pending.clear()
        data = len(message).to_bytes(4, "little") + message.tobytes()
        for connection in self._connections:
            connection.sendall(data)


class CommandReceiver:
    """A follower's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def receive(self) -> Iterator[Command]:
        """The commands of the next message; sleeps until there is one. Raises ConnectionError when rank 0 is gone."""
        word_count = int.from_bytes(self._read(4), "little")
        return unpack(numpy.frombuffer(self._read(4 * word_count), WORD))

    def _read(self, byte_count: int) -> bytearray:
        data = bytearray(byte_count)
        view = memoryview(data)
        while view:
            received = self._connection.recv_into(view)
            if received == 0:
                raise ConnectionError("rank 0 closed the connection")
            view = view[received:]
        return data
