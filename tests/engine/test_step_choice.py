"""The content of the next step, over random schedules: no clock, no model, only arriving feeds and computed rows.

Time is counted in steps. The promises are those of `specdec.engine.scheduling.feed`, in its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import Chunk
from specdec.engine.scheduling import feed as feeds_module
from specdec.engine.scheduling.feed import Feed, choose, divide, rows_beside_short
from tests.chaos.unshared_target import by_age

# The step before which a feed arrives, rows for context, rows with logits; 0: a prompt that is scored.
Arrival = tuple[int, int, int]


def feed_of(context_count: int, logit_count: int, start: int = 0) -> Feed:
    table = BlockTable(1 << 20, b"", start)
    if not logit_count:
        count = max(1, context_count)
        return Feed(table, start, range(count), count, None, part=lambda *_: None)
    row_count = context_count + logit_count
    return Feed(table, start, range(row_count), logit_count, None, done=lambda *_: None, failed=lambda _: None)


@dataclass
class Steps:
    """The queue of an engine, stepped by hand; `born` and `ended`: the steps at which a feed arrived and was done.
    `small`: rows of prompts of a small step, if the engine makes these, and quick ones beside short prompts."""

    chunk_size: int
    rows_max: int
    prompt_rows_max: int | None = None
    small: int | None = None
    waiting: list[Feed] = field(default_factory=list)
    born: dict[Feed, int] = field(default_factory=dict)
    ended: dict[Feed, int] = field(default_factory=dict)
    number: int = 0

    def submit(self, feed: Feed) -> Feed:
        self.waiting.append(feed)
        self.born[feed] = self.number
        return feed

    def step(self, is_decoding: bool) -> list[tuple[Feed, Chunk]]:
        prompt_rows_max = self.prompt_rows_max
        if self.small:
            prompt_rows_max = min(self.small, rows_beside_short(self.waiting, self.chunk_size) or self.small)
        chosen = choose(self.waiting, self.chunk_size, self.rows_max, is_decoding, prompt_rows_max)
        for feed, chunk in chosen:
            assert chunk.start == feed.next_position and chunk.token_ids, "a chunk goes on where the last one ended"
            feed.fed_count += len(chunk.token_ids)
            if feed.part is not None:
                assert chunk.logit_count == len(chunk.token_ids) <= self.chunk_size
            else:
                assert chunk.logit_count in (0, feed.logit_count), "rows with logits are not divided"
                assert (feed.row_count == 0) == bool(chunk.logit_count)
            if not feed.row_count:
                self.waiting.remove(feed)
                self.ended[feed] = self.number
        assert len({id(feed) for feed, _ in chosen}) == len(chosen)
        self.number += 1
        return chosen


sizes = st.tuples(st.integers(1, 12), st.integers(1, 40)).map(lambda pair: (min(pair), max(pair)))
arrival_lists = st.lists(
    st.tuples(
        st.integers(0, 12),
        st.one_of(st.just(0), st.just(0), st.integers(1, 60)),
        st.one_of(st.just(1), st.integers(0, 9)),
    ),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(sizes=sizes, arrivals=arrival_lists, small_chunks=st.sampled_from([0, 2, 4]))
def test_every_feed_ends_and_the_oldest_goes_on_in_every_step(
    sizes: tuple[int, int], arrivals: list[Arrival], small_chunks: int
) -> None:
    """Claim: for all arrivals, in each step the oldest prompt and the oldest decode go on, steps are within their
    rows, and every feed is done.

    Source: "within a token budget ... fairness by age". Conclusive as a proof of no starvation: the oldest of its kind
    advances in every step, whatever is behind it, so each feed becomes the oldest and ends; the bound at the end
    follows from it.
    """
    steps = Steps(*sizes, small=small_chunks * sizes[0])
    decode_rows_max = max([logits for _, _, logits in arrivals], default=0)
    last = max([at for at, _, _ in arrivals], default=0)
    while steps.number <= last or steps.waiting:
        for at, context, logits in arrivals:
            if at == steps.number:
                steps.submit(feed_of(context, logits))
        prompts = [feed for feed in steps.waiting if feed.context_count]
        decodes = [feed for feed in steps.waiting if not feed.context_count]
        before = {feed: feed.fed_count for feed in steps.waiting}
        chosen = steps.step(is_decoding=bool(steps.number % 2))
        for oldest in (*prompts[:1], *decodes[:1]):
            assert oldest.fed_count > before[oldest], "the oldest of its kind stands still"
        row_count = sum(len(chunk.token_ids) for _, chunk in chosen)
        share = min(steps.chunk_size, max(1, steps.rows_max // 2))
        assert row_count <= max(steps.rows_max, decode_rows_max + share)
        assert steps.number <= last + sum(max(1, context + logits) for _, context, logits in arrivals) + 1
    assert len(steps.ended) == len(arrivals)


@settings(max_examples=300, deadline=None)
@given(
    prompt_lengths=st.lists(st.integers(2, 300), min_size=1, max_size=30),
    arrivals=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=40),
    chunk_size=st.sampled_from([8, 64]),
)
def test_prompts_delay_a_decode_by_one_chunk_at_most(
    prompt_lengths: list[int], arrivals: list[tuple[int, int]], chunk_size: int
) -> None:
    """Claim: a decode submitted while any prompts run is in the very next step, and no step holds more rows of prompts
    than one chunk, beside last rows, which are decodes themselves.

    Source: "prefill never delays a decode by more than one chunk". Conclusive: every prompt waits from the first step
    on, so each decode competes with all prompts that are left; decodes of a step fit beside a chunk, as a session has
    one at a time and the limit allows for it.
    """
    steps = Steps(chunk_size, rows_max=chunk_size + 40 * 9)
    for length in prompt_lengths:
        steps.submit(feed_of(length - 1, length % 2))
    prompts = set(steps.waiting)
    decodes: list[Feed] = []
    while steps.waiting or steps.number <= 40:
        decodes += [steps.submit(feed_of(0, rows, 100)) for at, rows in arrivals if at == steps.number]
        context_counts = {feed: feed.context_count for feed in steps.waiting if feed in prompts}
        chosen = steps.step(is_decoding=True)
        assert sum(len(chunk.token_ids) for feed, chunk in chosen if context_counts.get(feed)) <= chunk_size
    assert all(steps.ended[feed] == steps.born[feed] for feed in decodes)


def test_without_decodes_prompts_fill_the_step() -> None:
    """Claim: without decodes a step takes a chunk of as many prompts as its rows, or those allowed for prompts, hold;
    with decodes, a chunk of one.

    Source: "more when none is present". Conclusive: all cases from the same queue.
    """
    steps = Steps(chunk_size=64, rows_max=512)
    for _ in range(10):
        steps.submit(feed_of(199, 1))
    assert [len(chunk.token_ids) for _, chunk in steps.step(is_decoding=False)] == [64] * 8
    assert [len(chunk.token_ids) for _, chunk in steps.step(is_decoding=True)] == [64]
    steps.prompt_rows_max = 128
    assert [len(chunk.token_ids) for _, chunk in steps.step(is_decoding=False)] == [64] * 2


def test_decodes_have_their_rows_beside_a_prompt_however_many_wait() -> None:
    """Claim: short feeds that wait, which decodes are too, change neither the rows of a step nor those of decodes: half
    of a small step is the prompt's share.

    Source: guarantee 4. Conclusive: the smallest step the settings allow, and one decode more than it could hold.
    """
    steps = Steps(chunk_size=64, rows_max=64, small=128)
    prompt = steps.submit(feed_of(1989, 1))
    for _ in range(65):
        steps.submit(feed_of(0, 1, 100))
    chosen = steps.step(is_decoding=True)
    assert sum(len(chunk.token_ids) for _, chunk in chosen) == 64 and len(chosen) == 32 + 1
    assert prompt.fed_count == 32


def test_a_step_is_quick_while_short_prompts_wait() -> None:
    """Claim: while prompts of at most one chunk wait, the next step has half a chunk of rows, or twice theirs, so that
    all of these end in it; the end of a long prompt makes no step quick.

    Source: a short prompt waits for the step it is in, too. Conclusive: steps of each kind of queue, row by row.
    """
    long, end = feed_of(LONG - 1, 1), feed_of(LONG - 1, 1)
    end.fed_count = LONG - 6
    assert rows_beside_short([long, end], 64) == 0
    assert rows_beside_short([long, feed_of(2, 1)], 64) == 32
    shorts = [feed_of(29, 1), feed_of(19, 1), feed_of(63, 1)]
    assert rows_beside_short([long, *shorts], 64) == 2 * (30 + 20 + 64)
    rows = divide(2 * (30 + 20 + 64), [long, end, *shorts], 64)
    assert all(rows[feed] == feed.row_count for feed in shorts) and rows[long] == 64


@pytest.mark.parametrize("is_decoding", [True, False])
def test_short_prompts_that_keep_coming_take_half_the_rows(is_decoding: bool) -> None:
    """Claim: a prompt that is neither the oldest nor the shortest ends within twice the steps that it takes by age,
    although further short prompts fill the other half of every step without end.

    Source: a client that sends short prompts without end must not stop others. Conclusive: with every step the queue
    gets as many rows of short prompts as a step has.
    """
    steps = Steps(chunk_size=64, rows_max=512)
    older = [steps.submit(feed_of(LONG - 1, 1)) for _ in range(3)]
    middle = steps.submit(feed_of(699, 1))
    step_rows = 64 if is_decoding else 512
    by_age = -(-(sum(feed.row_count for feed in older) + middle.row_count) // step_rows)
    while middle not in steps.ended:
        for _ in range(step_rows // 32):
            steps.submit(feed_of(31, 1))
        steps.step(is_decoding)
        assert steps.number <= 2 * by_age + 2


LONG, LONG_COUNT = 1990, 40


def steps_alone(row_count: int) -> int:
    """Steps of a prompt without others."""
    return -(-row_count // 64)


def behind_long_prompts(is_decoding: bool) -> tuple[dict[int, int], int]:
    """Runs 40 long prompts, and shorter ones that arrive meanwhile; returns the steps that each of these took, by its
    length, and those of all."""
    steps = Steps(chunk_size=64, rows_max=512)
    for _ in range(LONG_COUNT):
        steps.submit(feed_of(LONG - 1, 1))
    arrivals = {0: 3, 1: 4, 5: 30, 20: 200, 60: 5, 61: 700}
    shorter: dict[int, Feed] = {}
    while steps.waiting:
        if (length := arrivals.get(steps.number)) is not None:
            shorter[length] = steps.submit(feed_of(length - 1, 1))
        steps.step(is_decoding)
    return {length: steps.ended[feed] - steps.born[feed] + 1 for length, feed in shorter.items()}, steps.number


@pytest.mark.parametrize("is_decoding", [True, False])
def test_a_short_prompt_does_not_wait_for_long_ones(is_decoding: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: behind 40 prompts of 1,990 tokens, a shorter prompt has its first token within 10 times the steps that it
    needs alone, whenever it arrives; all together need the steps of a division by age alone, within 5 %.

    Source: a prompt of 3 tokens waited for all rows of 40 long prompts, 68 s instead of 32 ms. Conclusive: steps are
    counted until all have ended, and the same prompts divided by age break the bound.
    """
    took, step_count = behind_long_prompts(is_decoding)
    assert all(count <= 10 * steps_alone(length) for length, count in took.items()), took
    monkeypatch.setattr(feeds_module, "divide", by_age)
    took_by_age, step_count_by_age = behind_long_prompts(is_decoding)
    assert took_by_age[3] > 100
    assert step_count <= 1.05 * step_count_by_age


def test_short_prompts_do_not_starve_a_long_one() -> None:
    """Claim: under prompts that alone would fill every step, a long one takes at most twice the steps it needs alone,
    and one behind it twice the steps of both.

    Conclusive: a prompt of a whole chunk arrives before every step.
    """
    steps = Steps(chunk_size=64, rows_max=512)
    first, second = steps.submit(feed_of(LONG - 1, 1)), steps.submit(feed_of(LONG - 1, 1))
    while first in steps.waiting or second in steps.waiting:
        steps.submit(feed_of(63, 1))
        steps.step(is_decoding=True)
        assert steps.number <= 4 * steps_alone(LONG)
    assert steps.ended[first] <= 2 * steps_alone(LONG)


def test_the_rest_of_a_chunk_goes_to_the_next_prompt() -> None:
    """Claim: the end of one prompt and the beginning of the next share a chunk, and pieces meet absolute multiples of
    it again. Conclusive: all pieces of three prompts are listed."""
    steps = Steps(chunk_size=8, rows_max=64)
    feeds = [steps.submit(feed_of(context, 1)) for context in (4, 12, 20)]
    pieces = []
    while steps.waiting:
        pieces.append([(feeds.index(feed), len(chunk.token_ids)) for feed, chunk in steps.step(is_decoding=True)])
    assert pieces == [[(0, 5), (1, 3)], [(1, 5), (2, 3)], [(1, 5), (2, 3)], [(2, 2)], [(2, 8)], [(2, 5)]]


@pytest.mark.parametrize("wide_rows", [17, 200])
@pytest.mark.parametrize("rows_max", [64, 512])
def test_wide_verifications_get_the_steps_of_narrow_ones(wide_rows: int, rows_max: int) -> None:
    """Claim: sessions that ask again as soon as they are answered are in equally many steps, a wide verification no
    more than a decode, and none fewer, beside a prompt that never ends; whatever a step holds.

    Source: one stream's rate is at least 0.95 of any other's. Conclusive: steps are counted for each of 24 sessions
    over 300 steps, of which most cannot hold all; taking decodes by width, or passing over a wide one that does not
    fit for narrow ones behind it, breaks the equality.
    """
    steps = Steps(chunk_size=64, rows_max=rows_max)
    widths = [wide_rows if index % 3 == 0 else 1 for index in range(24)]
    counts = [0] * len(widths)
    names = {steps.submit(feed_of(0, rows)): index for index, rows in enumerate(widths)}
    steps.submit(feed_of(1 << 19, 1))
    for _ in range(300):
        for feed, _ in steps.step(is_decoding=True):
            if (index := names.pop(feed, None)) is not None:
                counts[index] += 1
                names[steps.submit(feed_of(0, widths[index]))] = index
    assert max(counts) - min(counts) <= 1, counts
