"""The draft's benchmark: a run of each of its parts on the shipped draft."""

from __future__ import annotations

from bench.draft.alone import draft_steps_ms, texts_of
from bench.draft.bare import BareLoop
from specdec.protocol.types import ResolvedSamplingParams
from tests.support.harness import DRAFT_MODEL
from tests.support.threads import one_thread  # noqa: F401
from tests.support.variants import RULES_DEFAULT, rule_of

CONTEXT = 64
ALL_PARAMS = [
    ResolvedSamplingParams(rule, 1, CONTEXT, temperature=temperature)
    for rule, temperature in map(rule_of, RULES_DEFAULT[:3])
]


def test_steps_of_every_size_are_timed_under_every_rule() -> None:
    """Claim: the draft takes steps of every requested size under every rule, and times them.

    Conclusive: a size without a step has no time.
    """
    found = draft_steps_ms(DRAFT_MODEL, "float32", ALL_PARAMS, (1, 4), 4)
    assert [list(own) for own in found] == [[1, 4]] * 3
    assert all(0 < own[1] < 1000 and 0 < own[4] < 1000 for own in found)


def test_the_bare_loop_is_timed_again_and_again_on_the_same_text() -> None:
    """Claim: a loop does not change the cache, so that every turn measures the same context."""
    bare = BareLoop(DRAFT_MODEL, "float32")
    texts = texts_of(2, CONTEXT)
    assert bare.step_ms(texts, 3) > 0
    length = bare._filled(texts).get_seq_length()
    assert bare.step_ms(texts, 3) > 0
    assert bare._filled(texts).get_seq_length() == length == CONTEXT - 1
