"""Hypothesis strategies: sampling parameters with any mix of features, logits full of ties, and paths."""

from __future__ import annotations

from hypothesis import strategies as st

from specdec.protocol.types import ResolvedSamplingParams, Rule

HALVES = st.integers(-8, 8).map(lambda value: value / 2)
# Penalties and biases: sums with logits are exact, so no two values differ by less than rounding.
SIXTY_FOURTHS = st.integers(-128, 128).map(lambda value: value / 64)
BIASES = st.integers(-6400, 6400).map(lambda value: value / 64)
SAMPLING_RULES = [Rule.REJECTION, Rule.COUPLED]


def sometimes(value: st.SearchStrategy, otherwise: object) -> st.SearchStrategy:
    """The neutral value half of the time, so that features meet in all mixtures."""
    return st.one_of(st.just(otherwise), value)


@st.composite
def all_params(draw: st.DrawFn, vocabulary_size: int, rules: list[Rule] | None = None) -> ResolvedSamplingParams:
    """Parameters for a small vocabulary, each field neutral half of the time. Ids may lie outside the vocabulary."""
    rule = draw(st.sampled_from(rules or SAMPLING_RULES))
    ids = st.sets(st.integers(0, vocabulary_size + 1), max_size=vocabulary_size)
    words = st.lists(st.lists(st.integers(0, vocabulary_size + 1), min_size=1, max_size=3).map(tuple), max_size=6)
    return ResolvedSamplingParams(
        rule,
        seed=draw(st.integers(0, (1 << 64) - 1)),
        prompt_length=draw(st.integers(1, 3)),
        temperature=0.0 if rule is Rule.GREEDY else draw(st.sampled_from([0.01, 0.3, 0.7, 1.0, 1.6, 100.0])),
        top_k=draw(sometimes(st.integers(1, vocabulary_size + 1), 0)),
        top_p=draw(sometimes(st.floats(0.01, 0.999), 1.0)),
        min_p=draw(sometimes(st.floats(0.001, 1.0), 0.0)),
        repetition_penalty=draw(sometimes(st.sampled_from([0.01, 0.5, 1.3, 100.0]), 1.0)),
        presence_penalty=draw(sometimes(SIXTY_FOURTHS, 0.0)),
        frequency_penalty=draw(sometimes(SIXTY_FOURTHS, 0.0)),
        logit_bias=tuple((token, draw(BIASES)) for token in sorted(draw(sometimes(ids, set())))),
        min_tokens=draw(sometimes(st.integers(0, 5), 0)),
        stop_token_ids=tuple(sorted(draw(sometimes(ids, set())))),
        allowed_token_ids=tuple(sorted(draw(sometimes(ids, set())))),
        bad_words=tuple(draw(sometimes(words, []))),
    )


@st.composite
def rounds(
    draw: st.DrawFn, rules: list[Rule] | None = None
) -> tuple[ResolvedSamplingParams, list[int], tuple[int, ...], list[list[float]]]:
    """Sampling parameters, committed tokens, draft tokens, and logits for every position of the round."""
    vocabulary_size = draw(st.integers(2, 9))
    token = st.integers(0, vocabulary_size - 1)
    params = draw(all_params(vocabulary_size, rules))
    committed = draw(st.lists(token, min_size=params.prompt_length, max_size=params.prompt_length + 4))
    draft_token_ids = tuple(draw(st.lists(token, max_size=4)))
    line = st.lists(HALVES, min_size=vocabulary_size, max_size=vocabulary_size)
    count = len(draft_token_ids) + 1
    return params, committed, draft_token_ids, draw(st.lists(line, min_size=count, max_size=count))
