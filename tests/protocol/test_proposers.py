"""The coordinator's own proposers: each run is what follows an earlier match."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from specdec.protocol.heads import HeadProposals
from specdec.protocol.proposers import (
    MATCH_LENGTH_MAX,
    NGRAM_LENGTH_MIN,
    PLACES_MAX,
    RUN_LENGTH_MAX,
    NgramProposer,
    PredictionProposer,
    Run,
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


def test_heads_propose_a_chain_and_one_alternative() -> None:
    """Claim: the likeliest tokens of the heads are one run, the first head's second choice another, and a token beyond
    the vocabulary ends a run; without proposals there is none."""
    proposals = HeadProposals((1, 2, 3, 4), bytes((250, 5, 128, 1)))
    first, second = head_runs(proposals, 100)
    assert first == Run(Proposer.HEADS, (1, 3), 0, 0, (17, 11)) and second == Run(Proposer.HEADS, (2,), 0, 1, (2,))
    assert [run.token_ids for run in head_runs(HeadProposals((5, 6, 7, 8), bytes((20, 10, 30, 2))), 7)] == [(5,), (6,)]
    assert [run.token_ids for run in head_runs(proposals, 3)] == [(1,), (2,)]
    assert head_runs(None, 100) == []
