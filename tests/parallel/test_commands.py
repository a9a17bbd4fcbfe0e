"""Commands of rank 0 arrive at the other ranks unchanged: packed integers over a real socket."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.parallel.commands import (
    WORDS_MAX,
    Allocate,
    CommandReceiver,
    CommandSender,
    CopySlots,
    Scrub,
    Step,
    Stop,
    pack,
    unpack,
)

BLOCK_SIZE = 8
numbers = st.integers(0, 2**31 - 1)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    """A chunk with more blocks than its cells need, as with reserved blocks, a chain or one with a tree below."""
    start = draw(st.integers(0, 100))
    token_ids = draw(st.lists(numbers, min_size=1, max_size=20))
    cells = st.lists(st.integers(0, 150), min_size=1, max_size=5)
    paths = draw(st.lists(cells, max_size=len(token_ids)))
    chunk = Chunk([], start, token_ids, draw(st.integers(0, len(token_ids))), paths)
    needed = -(-chunk.cell_end // BLOCK_SIZE)
    return replace(chunk, block_ids=draw(st.lists(numbers, min_size=needed, max_size=needed + 3)))


@given(st.lists(chunks(), max_size=5), st.lists(st.tuples(numbers, numbers, numbers), max_size=3))
def test_commands_arrive_unchanged(sent: list[Chunk], scrubs: list[tuple[int, int, int]]) -> None:
    """Claim: any mix of commands arrives equal and in order, without the blocks beyond a chunk's end.

    Conclusive: any numbers that fit a word, any shapes; the receiver's values equal the sender's.
    """
    small = [Allocate(5, BLOCK_SIZE), CopySlots((5, 6, 1, 2)), *(Scrub(*scrub) for scrub in scrubs), Stop()]
    ends, other = socket.socketpair()
    with ends, other:
        sender, receiver = CommandSender([ends]), CommandReceiver(other)
        for command in small:
            sender.add(pack(command))
        sender.send(pack(Step(RaggedBatch(tuple(sent))), BLOCK_SIZE))
        *received, step = receiver.receive()
    assert received == small
    assert isinstance(step, Step) and len(step.batch.chunks) == len(sent)
    for found, chunk in zip(step.batch.chunks, sent):
        assert found == replace(chunk, block_ids=chunk.block_ids[: -(-chunk.cell_end // BLOCK_SIZE)])


def test_a_message_of_too_many_words_ends_the_connection() -> None:
    """Claim: a count above WORDS_MAX is refused before anything is allocated for it. Conclusive: the words never come,
    so a receiver that believed the count would wait, with 64 MiB and more."""
    ends, other = socket.socketpair()
    with ends, other:
        other.settimeout(5)
        ends.sendall((WORDS_MAX + 1).to_bytes(4, "little"))
        with pytest.raises(ConnectionError, match="words"):
            CommandReceiver(other).receive()


def test_a_step_is_compact() -> None:
    """Claim: a decode of 16 sequences of 1,000 tokens takes less than 2 KiB."""
    batch = RaggedBatch(tuple(Chunk(list(range(100)), 1000, [7], 1) for _ in range(16)))
    words = pack(Step(batch), 64)
    assert words.nbytes < 2048 and next(unpack(words)) != Stop()
