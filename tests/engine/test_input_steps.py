"""Encoders' inputs in the rows of a step: they run whole, one beyond its share at most, and no feed starves.

The plan's reference lists the slots of every row one by one; schedules are those of `test_step_choice.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specdec.engine.backend import check_inputs
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.cpu.fallback import seen_slots
from specdec.engine.cpu.plan import divide_rows, plan_step
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.scheduling.feed import Feed
from tests.engine.test_step_choice import Steps, feed_of
from tests.engine.test_step_plan import BLOCK_SIZE, BLOCKS, chains, trees


@st.composite
def batches_with_inputs(draw: st.DrawFn) -> tuple[RaggedBatch, list[list[int]]]:
    """Chunks that begin with their inputs, go on behind them, or are trees there; the slots that a row of a decoder
    alone would see."""
    count = draw(st.integers(1, 4))
    ids = draw(st.permutations(range(1, 1 + BLOCKS * count)))
    chunks, seen = [], []
    for index in range(count):
        kind = draw(st.sampled_from([chains, trees]))
        chunk, rows = draw(kind(list(ids[index * BLOCKS :][:BLOCKS])))
        assume(chunk.base > 0)
        length = draw(st.integers(1, chunk.start or chunk.base))
        logits = min(chunk.logit_count, len(chunk.token_ids) - (0 if chunk.start else length))
        chunks.append(Chunk(chunk.block_ids, chunk.start, chunk.token_ids, logits, chunk.paths, length))
        seen += rows
    return RaggedBatch(tuple(chunks)), seen


@given(batches_with_inputs())
def test_every_row_sees_its_own_stack_and_its_input(case: tuple[RaggedBatch, list[list[int]]]) -> None:
    """Claim: a row of an input sees the whole input; any other sees the cells behind the input and its path, and in
    cross attention the input's cells. Conclusive: any mix of inputs, chains and trees, against lists made cell by
    cell."""
    batch, seen = case
    check_inputs(batch, has_encoder=True)
    plan = plan_step(batch, BLOCK_SIZE)
    stacks = divide_rows(batch, plan.rows)
    row, encoder, decoder = 0, 0, 0
    for chunk in batch.chunks:
        length = chunk.encoder_length
        own_input = [chunk.block_ids[cell // BLOCK_SIZE] * BLOCK_SIZE + cell % BLOCK_SIZE for cell in range(length)]
        for _ in range(chunk.input_count):
            assert stacks.encoder_index[encoder] == row
            assert seen_slots(stacks.encoder, encoder, None, BLOCK_SIZE).tolist() == own_input
            assert stacks.encoder.slot[encoder] == plan.rows.slot[row]
            row, encoder = row + 1, encoder + 1
        for _ in range(len(chunk.token_ids) - chunk.input_count):
            assert stacks.decoder_index[decoder] == row
            assert seen_slots(stacks.decoder, decoder, None, BLOCK_SIZE).tolist() == seen[row][length:]
            assert seen_slots(stacks.cross, decoder, None, BLOCK_SIZE).tolist() == own_input
            assert stacks.decoder.position[decoder] == len(seen[row]) - 1
            row, decoder = row + 1, decoder + 1
    assert (encoder, decoder) == (len(stacks.encoder_index), len(stacks.decoder_index))


WRONG_CHUNKS: list[tuple[Chunk, bool, str]] = [
    (
        Chunk([1], 0, [1, 2], 1, (), 2),
        True,
        "rows from 0 to 1 with 1 logits; the encoder's input, 2 tokens, runs whole",
    ),
    (Chunk([1], 0, [1, 2], 0, (), 3), True, "rows from 0 to 1 with 0 logits; the encoder's input, 3 tokens"),
    (Chunk([1], 2, [1, 2], 1, (), 3), True, "rows from 2 to 3 with 1 logits"),
    (Chunk([1], 0, [1, 2, 3], 1, ((2,), (3,)), 2), True, "rows from 0 to 0 with 1 logits"),
    (Chunk([1], 0, [1, 2], 1), True, "encoder_length is 0; it must be 1 or more: the model has an encoder"),
    (Chunk([1], 0, [1, 2], 1, (), 1), False, "encoder_length is 1; it must be 0: the model is a decoder alone"),
]


@pytest.mark.parametrize(("chunk", "has_encoder", "said"), WRONG_CHUNKS)
def test_chunks_that_divide_an_input_are_refused(chunk: Chunk, has_encoder: bool, said: str) -> None:
    """Claim: a part of an input, logits of its rows, and chunks of the other kind of model raise ValueError before
    anything is computed. Conclusive: beside a chunk that is right."""
    right = Chunk([2], 0, [1, 2, 3], 1, (), 2 if has_encoder else 0)
    check_inputs(RaggedBatch((right,)), has_encoder)
    with pytest.raises(ValueError, match=said):
        check_inputs(RaggedBatch((right, chunk)), has_encoder)


def feed_with_input(length: int, context_count: int, logit_count: int, start: int = 0, **options: Any) -> Feed:
    table = BlockTable(1 << 20, b"", start, encoder_length=length)
    return Feed(table, start, range(length + context_count + logit_count - start), logit_count, None, **options)


def test_feeds_that_divide_an_input_are_refused() -> None:
    """Claim: a feed from inside an input, one that ends there, logits of its rows, and parts of it are ValueErrors by
    field, value and limit. Conclusive: the same behind the input are none."""
    for start, context, logits in ((0, 0, 0), (0, 0, 3), (5, 2, 1), (6, 1, 2)):
        feed_with_input(5, context, logits, start)
    with pytest.raises(ValueError, match="rows from 3 to 6; the encoder's input, 5 tokens, runs whole"):
        feed_with_input(5, 0, 1, 3)
    with pytest.raises(ValueError, match="rows from 0 to 4; the encoder's input, 5 tokens"):
        Feed(BlockTable(9, b"", encoder_length=5), 0, range(4), 0, None)
    with pytest.raises(ValueError, match="logit_count is 3; it must be from 0 to 2"):
        Feed(BlockTable(9, b"", encoder_length=5), 0, range(7), 3, None)
    with pytest.raises(ValueError, match="part is given at position 0; it must be at 5 or above"):
        feed_with_input(5, 0, 2, part=lambda *_: None)
    feed_with_input(5, 2, 0, 5, part=lambda *_: None)


sizes = st.tuples(st.integers(1, 12), st.integers(1, 40)).map(lambda pair: (min(pair), max(pair)))
# The step before which a feed arrives, the length of its input (0: a decode), other rows, rows with logits.
arrival_lists = st.lists(
    st.tuples(st.integers(0, 12), st.one_of(st.just(0), st.integers(1, 60)), st.integers(0, 30), st.integers(1, 6)),
    max_size=25,
)


@settings(max_examples=300, deadline=None)
@given(sizes=sizes, arrivals=arrival_lists, small_chunks=st.sampled_from([0, 2, 4]))
def test_inputs_run_whole_and_no_feed_starves(
    sizes: tuple[int, int], arrivals: list[tuple[int, int, int, int]], small_chunks: int
) -> None:
    """Claim: for all arrivals an input runs in one chunk, in each step the oldest prompt and the oldest decode go on,
    only the oldest prompt's input makes a step longer than its rows, and every feed is done.

    Conclusive: inputs of up to 60 rows beside steps of 1 to 40, many at once; `Steps` checks that rows follow each
    other and that those with logits are not divided.
    """
    steps = Steps(*sizes, small=small_chunks * sizes[0])
    chunk_size, rows_max = sizes
    logits_max = max([logits for _, _, _, logits in arrivals], default=0)
    last = max([at for at, *_ in arrivals], default=0)
    while steps.number <= last or steps.waiting:
        for at, length, context, logits in arrivals:
            if at == steps.number:
                steps.submit(feed_with_input(length, context, logits) if length else feed_of(0, logits))
        prompts = [feed for feed in steps.waiting if feed.context_count]
        decodes = [feed for feed in steps.waiting if not feed.context_count]
        needed = {feed: feed.input_count for feed in steps.waiting}
        chosen = steps.step(is_decoding=bool(arrivals) and steps.number % 2 == 0)
        counts = {feed: len(chunk.token_ids) for feed, chunk in chosen}
        for kind in (prompts, decodes):
            assert not kind or counts[kind[0]] > 0, "the oldest goes on"
        for feed, chunk in chosen:
            assert chunk.encoder_length == feed.table.encoder_length
            assert not needed[feed] or counts[feed] >= needed[feed], "an input is not divided"
        beyond = [feed for feed in chosen if needed[feed[0]]][:1]
        excess = sum(counts.values()) - max(rows_max, logits_max + chunk_size)
        if excess > 0:
            assert prompts and needed[prompts[0]] > 0 and excess <= counts[prompts[0]], beyond
    assert len(steps.ended) == len(arrivals)
