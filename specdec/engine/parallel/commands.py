"""The commands of rank 0 to the others, as packed integers over a socket: allocate, copy, scrub, step, stop.

Copy and scrub are sent with the next step: only steps read the storage. A follower blocks on its socket between steps.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import accumulate
from typing import TypeAlias

import numpy

from specdec.engine.interface import Chunk, RaggedBatch

WORD = numpy.dtype("<i4")
WORDS_MAX = 1 << 24  # of a message: 1,024 sequences of 131,072 positions in blocks of 16 have half as many
HEAD_WORDS = 6  # of a chunk: start, counts of tokens, blocks, logits, paths and the cells of these


@dataclass(frozen=True, slots=True)
class Stop:
    """No more steps: the ranks end normally."""


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate the storage, as `CausalModel.allocate`."""

    block_count: int
    block_size: int


@dataclass(frozen=True, slots=True)
class CopySlots:
    """As `Storage.copy_slots`: `slots` are the sources, then as many destinations."""

    slots: tuple[int, ...]


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


Command: TypeAlias = Stop | Allocate | CopySlots | Scrub | Step
KINDS: tuple[type, ...] = (Stop, Allocate, CopySlots, Scrub, Step)  # a kind's number is its index


def pack(command: Command, block_size: int = 1) -> numpy.ndarray:
    """Returns one command as int32 words: its number, the count of its words, the words.

    A chunk's blocks are those up to its last cell.
    """
    if isinstance(command, Step):
        return _pack_step(command.batch, block_size)
    words = command.slots if isinstance(command, CopySlots) else astuple(command)
    return numpy.array((KINDS.index(type(command)), len(words), *words), WORD)


def _pack_step(batch: RaggedBatch, block_size: int) -> numpy.ndarray:
    heads: list[int] = [len(batch.chunks)]
    tails: list[Sequence[int]] = []
    for chunk in batch.chunks:
        block_ids = chunk.block_ids[: -(-chunk.cell_end // block_size)]
        lengths, cells = [len(path) for path in chunk.paths], [cell for path in chunk.paths for cell in path]
        heads += (chunk.start, len(chunk.token_ids), len(block_ids), chunk.logit_count, len(lengths), len(cells))
        tails += (chunk.token_ids, block_ids, lengths, cells)
    words = numpy.concatenate([numpy.asarray(part, WORD) for part in (heads, *tails)])
    return numpy.concatenate((numpy.array((KINDS.index(Step), len(words)), WORD), words))


def unpack(words: numpy.ndarray) -> Iterator[Command]:
    """Yields the commands of one message, in order."""
    place = 0
    while place < len(words):
        number, count = words[place : place + 2].tolist()
        own = words[place + 2 : place + 2 + count]
        place += 2 + count
        kind = KINDS[number]
        if kind is Step:
            yield Step(_unpack_batch(own))
        elif kind is CopySlots:
            yield CopySlots(tuple(own.tolist()))
        else:
            yield kind(*own.tolist())


def _unpack_batch(words: numpy.ndarray) -> RaggedBatch:
    chunk_count = int(words[0])
    heads = words[1 : 1 + HEAD_WORDS * chunk_count].reshape(-1, HEAD_WORDS).tolist()
    place = 1 + HEAD_WORDS * chunk_count
    chunks = []
    for start, token_count, block_count, logit_count, *path_counts in heads:
        parts = []
        for count in (token_count, block_count, *path_counts):
            parts.append(words[place : place + count].tolist())
            place += count
        token_ids, block_ids, lengths, cells = parts
        ends = [*accumulate(lengths)]
        paths = [cells[end - length : end] for end, length in zip(ends, lengths)]
        chunks.append(Chunk(block_ids, start, token_ids, logit_count, paths))
    return RaggedBatch(tuple(chunks))


class CommandSender:
    """Rank 0's end: one connection to every other rank."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections
        self._pending: list[numpy.ndarray] = []

    def add(self, words: numpy.ndarray) -> None:
        """Queues a command for the next message."""
        self._pending.append(words)

    def send(self, words: numpy.ndarray) -> None:
        """Sends the queued commands and this one as one message. Raises OSError when a rank is lost."""
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
        """Returns the commands of the next message; waits for it. Raises ConnectionError when rank 0 is lost, or sends
        more than WORDS_MAX."""
        word_count = int.from_bytes(self._read(4), "little")
        if word_count > WORDS_MAX:
            raise ConnectionError(f"rank 0 sent a message of {word_count} words, at most {WORDS_MAX} are allowed")
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
