"""What rank 0 tells the others arrives as it was said: packed integers over a real socket."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from specdec.engine.interface import RaggedBatch, Segment
from specdec.engine.parallel.commands import (
    Allocate,
    CommandReceiver,
    CommandSender,
    CopyBlock,
    Scrub,
    Step,
    Stop,
    pack,
    unpack,
)

BLOCK_SIZE = 8
numbers = st.integers(0, 2**31 - 1)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    """A segment whose blocks reach beyond what it needs, as reserved ones do."""
    start = draw(st.integers(0, 100))
    token_ids = draw(st.lists(numbers, min_size=1, max_size=20))
    needed = -(-(start + len(token_ids)) // BLOCK_SIZE)
    block_ids = draw(st.lists(numbers, min_size=needed, max_size=needed + 3))
    return Segment(block_ids, start, token_ids, draw(st.integers(0, len(token_ids))))


@given(st.lists(segments(), max_size=5), st.lists(st.tuples(numbers, numbers, numbers), max_size=3))
def test_commands_arrive_as_they_were_said(told: list[Segment], scrubs: list[tuple[int, int, int]]) -> None:
    """Claim: any mix of commands comes out equal and in order, blocks beyond a segment's end left out.

    Conclusive: any numbers that fit a word, any shapes; the receiver's values equal the sender's.
    """
    small = [Allocate(5, BLOCK_SIZE), CopyBlock(1, 2), *(Scrub(*scrub) for scrub in scrubs), Stop()]
    ends, other = socket.socketpair()
    with ends, other:
        sender, receiver = CommandSender([ends]), CommandReceiver(other)
        for command in small:
            sender.add(pack(command))
        sender.send(pack(Step(RaggedBatch(tuple(told))), BLOCK_SIZE))
        *received, step = receiver.receive()
    assert received == small
    assert isinstance(step, Step) and len(step.batch.segments) == len(told)
    for found, segment in zip(step.batch.segments, told):
        assert (found.start, found.token_ids, found.logit_count) == (
            segment.start,
            segment.token_ids,
            segment.logit_count,
        )
        assert found.block_ids == segment.block_ids[: -(-segment.end // BLOCK_SIZE)]


def test_a_step_is_compact() -> None:
    """Claim: a decode of 16 sequences of 1,000 tokens is told in less than 2 KiB."""
    batch = RaggedBatch(tuple(Segment(list(range(100)), 1000, [7], 1) for _ in range(16)))
    words = pack(Step(batch), 64)
    assert words.nbytes < 2048 and next(unpack(words)) != Stop()
