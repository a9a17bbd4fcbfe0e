"""The coordinator's own proposers: each run is what follows an earlier match, and the store keeps salts and bounds."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from specdec.protocol.heads import HeadProposals
from specdec.protocol.proposers import (
    MATCH_LENGTH_MAX,
    NGRAM_LENGTH_MIN,
    PLACES_MAX,
    RUN_LENGTH_MAX,
    STORED_TOKEN_BYTES,
    SUFFIX_LENGTH_MIN,
    SUFFIX_TEXT_LENGTH_MAX,
    NgramProposer,
    PredictionProposer,
    Run,
    SuffixProposer,
    SuffixStore,
    head_runs,
)
from specdec.protocol.types import Proposer

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)
LINE = [0, 1, 2, 3, 0, 0, 1, 1]


def matched_length(tokens: Sequence[int], place: int, context: Sequence[int]) -> int:
    """The number of equal tokens before a place and at a context's end, one after the other."""
    length = 0
    while length < min(place, len(context), MATCH_LENGTH_MAX) and tokens[place - 1 - length] == context[-1 - length]:
        length += 1
    return length


@given(TEXTS, TEXTS)
@example([0, 1, 3, *[0, 1, 2] * 9], [0, 1])  # the other token follows a place before the last eight
@example([*LINE, 2, 0, *LINE[2:], 3, 1, *LINE[4:], 0], LINE)  # a match of six, and after it one of four
def test_ngram_runs_continue_the_longest_matches(prompt: list[int], output: list[int]) -> None:
    """Claim: the first run is what followed the longest match, of equal ones the latest; the second what followed the
    latest place with another token, among the last eight of as many tokens, or of half of them, down to two; and a
    proposer that saw a text grow finds what a new one finds. Conclusive: the length before every place is counted by
    brute force, for random texts of four tokens, in which nearly every n-gram repeats."""
    committed = list(prompt)
    proposer = NgramProposer(committed)
    for token_id in output:
        committed.append(token_id)
        runs = proposer.propose(committed)
    runs = proposer.propose(committed)
    assert runs == NgramProposer(committed).propose(committed)
    lengths = {place: matched_length(committed, place, committed) for place in range(len(committed))}
    best = max((length, place) for place, length in lengths.items())
    if best[0] < NGRAM_LENGTH_MIN:
        assert runs == []
        return
    expected, length = [best], best[0]
    while len(expected) == 1 and length >= NGRAM_LENGTH_MIN:
        places = [place for place in reversed(lengths) if lengths[place] >= length][:PLACES_MAX]
        others = [place for place in places if committed[place] != committed[best[1]]]
        expected += [(lengths[place], place) for place in others[:1]]
        length = length // 2 if length == NGRAM_LENGTH_MIN else max(length // 2, NGRAM_LENGTH_MIN)
    assert [(run.strength, run.token_ids[0]) for run in runs] == [(one, committed[place]) for one, place in expected]
    for run, (_, place) in zip(runs, expected, strict=True):
        following = committed[place:]
        assert run.token_ids == tuple((following * RUN_LENGTH_MAX)[:RUN_LENGTH_MAX])
    assert [run.rank for run in runs] == list(range(len(runs)))


def test_the_longest_match_is_found_among_many_shorter_ones() -> None:
    """Claim: no number of later, shorter matches hides the longest. Conclusive: a line of twelve tokens stands in the
    prompt once, and fifty times after it the last n of its tokens, for every n from two to eleven, each followed by
    another token."""
    line = list(range(100, 112))
    later = [token for number in range(50) for n in range(2, 12) for token in (*line[-n:], 1000 + 10 * number + n)]
    committed = [*line, 77, *later, 50, *line]
    run = NgramProposer(committed).propose(committed)[0]
    assert (run.strength, run.token_ids[0]) == (len(line), 77)


def test_a_text_that_repeats_is_continued_beyond_its_end() -> None:
    """Claim: a match near the end goes on with itself: after a b a b the run is a b a b ..."""
    committed = [9, 1, 2, 1, 2]
    (run,) = NgramProposer(committed).propose(committed)
    assert run == Run(Proposer.NGRAM, (1, 2) * (RUN_LENGTH_MAX // 2), 2)


def test_a_token_of_any_id_is_read() -> None:
    """Claim: ids beyond the characters that the text is kept in, and those of surrogates, are matched and proposed."""
    committed = [2**31 - 1, 0xD800, 7, 5, 2**31 - 1, 0xD800]
    run = NgramProposer(committed).propose(committed)[0]
    assert (run.strength, run.token_ids[:4]) == (2, (7, 5, 2**31 - 1, 0xD800))


def test_matches_are_compared_by_the_longest_length_only() -> None:
    """Claim: `length_max` bounds the comparison: of matches that agree that far the latest is continued, although an
    earlier one agrees further."""
    committed = [1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4]
    assert NgramProposer(committed, 2).propose(committed)[0].token_ids[:2] == (5, 9)
    assert NgramProposer(committed, 2, length_max=2).propose(committed)[0].token_ids[:2] == (6, 1)


def test_a_match_before_the_window_is_not_found() -> None:
    """Claim: of a prompt only the last `window` tokens are searched, the output is searched always."""
    prompt = [1, 2, 5, *range(10, 20)]
    assert NgramProposer([*prompt, 1, 2], 2, window=len(prompt) + 2).propose([*prompt, 1, 2])[0].token_ids[0] == 5
    committed = [*prompt, 1, 2]
    proposer = NgramProposer(committed, 2, window=8)
    assert proposer.propose(committed) == []
    committed += [7, 1, 2]
    assert proposer.propose(committed)[0].token_ids[0] == 7


def test_a_prediction_is_followed_left_and_found_again() -> None:
    """Claim: a prediction is proposed from its start; while the output follows it the strength grows; output that
    leaves it gets no run until its last tokens stand in the prediction again."""
    prediction, committed = [5, 6, 7, 8, 9, 10, 11, 12], [3, 3, 3]
    proposer = PredictionProposer(prediction, output_start=3)
    (first,) = proposer.propose(committed)
    assert first.token_ids == tuple(prediction)
    committed += [5, 6]
    (second,) = proposer.propose(committed)
    assert second.token_ids == tuple(prediction[2:]) and second.strength == first.strength + 2
    committed += [99, 8]
    assert proposer.propose(committed) == []
    committed += [9]
    (third,) = proposer.propose(committed)
    assert third == Run(Proposer.PREDICTION, (10, 11, 12), 2)
    committed += [10, 11, 12]
    assert proposer.propose(committed) == []


@given(TEXTS, TEXTS)
@example([*LINE, 2], LINE)
def test_a_prediction_is_found_again_by_its_longest_match(prediction: list[int], output: list[int]) -> None:
    """Claim: output that left the prediction is followed from the place in it with the longest match of at least two
    tokens. Conclusive: restated by brute force; the output begins with a token that the prediction lacks."""
    committed = [9, 9, 8, *output]
    lengths = {place: matched_length(prediction, place, committed) for place in range(len(prediction))}
    strength, place = max((length, place) for place, length in lengths.items())
    runs = PredictionProposer(prediction, output_start=2).propose(committed)
    found = Run(Proposer.PREDICTION, tuple(prediction[place : place + RUN_LENGTH_MAX]), strength)
    assert runs == ([found] if strength >= NGRAM_LENGTH_MIN else [])


def test_the_prompt_is_no_output() -> None:
    """Claim: tokens of the prompt that stand in the prediction do not move its start."""
    proposer = PredictionProposer([5, 6, 7], output_start=2)
    assert proposer.propose([5, 6])[0].token_ids == (5, 6, 7)


def test_the_store_never_crosses_salts() -> None:
    """Claim: a text is found by its own salt only, in full, and not by another or by none."""
    store, text = SuffixStore(1 << 20), list(range(100, 160))
    store.add("a", text)
    store.add("b", [token_id + 1000 for token_id in text])
    committed = text[10 : 10 + SUFFIX_LENGTH_MIN]
    (found,) = SuffixProposer(store, "a").propose(committed)
    assert found == Run(Proposer.SUFFIX, tuple(text[14 : 14 + RUN_LENGTH_MAX]), SUFFIX_LENGTH_MIN)
    for salt in ("b", "", "A"):
        assert SuffixProposer(store, salt).propose(committed) == []


@given(st.lists(st.tuples(st.sampled_from("ab"), TEXTS), max_size=12), st.integers(0, 40))
def test_the_store_is_bounded_and_forgets_whole_texts(added: list[tuple[str, list[int]]], token_max: int) -> None:
    """Claim: after every text the bytes in use are at most the limit, and every run found is what follows the context
    in some text of that salt, so no place of a forgotten text is left."""
    store, kept = SuffixStore(token_max * STORED_TOKEN_BYTES), list[tuple[str, list[int]]]()
    for salt, text in added:
        store.add(salt, text)
        kept.append((salt, text))
        assert store.byte_count <= token_max * STORED_TOKEN_BYTES
        for own, context in kept:
            for run in store.runs(own, context):
                whole = [*context[-SUFFIX_LENGTH_MIN:], *run.token_ids]
                assert any(
                    other == own and any(text[i : i + len(whole)] == whole for i in range(len(text)))
                    for other, text in kept
                )


def test_the_least_recently_used_text_goes_first() -> None:
    """Claim: of two texts the one that was found last stays."""
    texts = [list(range(start, start + 10)) for start in (0, 100, 200)]
    store = SuffixStore(20 * STORED_TOKEN_BYTES)
    store.add("", texts[0])
    store.add("", texts[1])
    assert store.runs("", texts[0][:SUFFIX_LENGTH_MIN])
    store.add("", texts[2])
    found = [bool(store.runs("", text[:SUFFIX_LENGTH_MIN])) for text in texts]
    assert found == [True, False, True]


def test_the_store_uses_no_more_memory_than_it_counts() -> None:
    """Claim: for text that never repeats, the worst kind, the bytes that Python allocates for the store are those that
    it counts, within a tenth above, at every size: its dictionary grows by doubling. Conclusive: counted by tracemalloc
    after every text, texts long and short; and at the end four fifths at least, so that the bound is no waste."""
    for length in (SUFFIX_TEXT_LENGTH_MAX, 300):
        rng, store = random.Random(length), SuffixStore(1 << 30)
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(40_000 // length):
                store.add(f"salt {number % 3}", [rng.randrange(1000, 200_000) for _ in range(length)])
                allocated = tracemalloc.get_traced_memory()[0] - before
                assert allocated < 1.1 * store.byte_count, number
            assert allocated > 0.8 * store.byte_count
        finally:
            tracemalloc.stop()


def test_a_text_that_is_generated_again_is_stored_once() -> None:
    """Claim: a recurring answer takes the store's bytes once, and its return is a use of it.

    Conclusive: stored twice, the first text would leave no place for the second; not used, it would go before it. Under
    another salt, or with another end, it is another text.
    """
    first, second, third = (list(range(start, start + 10)) for start in (0, 100, 200))
    store = SuffixStore(20 * STORED_TOKEN_BYTES)
    for text in (first, second, first, first):
        store.add("", text)
    assert store.byte_count == 20 * STORED_TOKEN_BYTES
    assert store.runs("", second[:SUFFIX_LENGTH_MIN]) and store.runs("", first[:SUFFIX_LENGTH_MIN])
    store.add("", second)
    store.add("", first)
    store.add("", third)
    assert [bool(store.runs("", text[:SUFFIX_LENGTH_MIN])) for text in (first, second, third)] == [True, False, True]
    large = SuffixStore(1 << 20)
    for salt, text in (("", first), ("a", first), ("", [*first[:-1], 77])):
        large.add(salt, text)
    assert large.byte_count == 30 * STORED_TOKEN_BYTES


def test_heads_propose_a_chain_and_one_alternative() -> None:
    """Claim: the likeliest tokens of the heads are one run, the first head's second choice another, and a token beyond
    the vocabulary ends a run; without proposals there is none."""
    proposals = HeadProposals((1, 2, 3, 4), bytes((250, 5, 128, 1)))
    first, second = head_runs(proposals, 100)
    assert first == Run(Proposer.HEADS, (1, 3), 0, 0, (17, 11)) and second == Run(Proposer.HEADS, (2,), 0, 1, (2,))
    assert [run.token_ids for run in head_runs(HeadProposals((5, 6, 7, 8), bytes((20, 10, 30, 2))), 7)] == [(5,), (6,)]
    assert [run.token_ids for run in head_runs(proposals, 3)] == [(1,), (2,)]
    assert head_runs(None, 100) == []
