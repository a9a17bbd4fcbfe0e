"""The rule itself: what passes, what follows, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from coordinator.rejection import decide
from specdec.errors import InvalidRequest
from specdec.protocol.types import Evidence, Row, Rule, TokenKind, Verdict

HALVES = Row((0, 1), (1, 1))


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
def test_equality_rules(rule: Rule) -> None:
    """Claim: draft tokens pass while they equal the target's; the first other one is replaced; then the bonus."""
    evidence = Evidence((4, 5, 6))
    assert decide(rule, (4, 5), (), evidence, ()) == Verdict(2, 6, TokenKind.BONUS)
    assert decide(rule, (4, 0), (), evidence, ()) == Verdict(1, 5, TokenKind.CORRECTION)
    assert decide(rule, (0, 5), (), evidence, ()) == Verdict(0, 4, TokenKind.CORRECTION)
    assert decide(rule, (), (), Evidence((9,)), ()) == Verdict(0, 9, TokenKind.BONUS)


def test_the_test_is_strict() -> None:
    """Claim: accept when u * draft_prob < target_prob, strictly. Conclusive: both sides of a border that is exact in
    float64 (draft 1/2, target 1/4, border u = 1/2), and target probability 0, which passes for no u, not even 0.
    """
    for draw, accepted in [(0.0, 1), (math.nextafter(0.5, 0), 1), (0.5, 0), (math.nextafter(1, 0), 0)]:
        verdict = decide(Rule.REJECTION, (1,), (HALVES,), Evidence((7, 8), (0.25,)), (draw,))
        assert verdict.accepted_count == accepted
    assert decide(Rule.REJECTION, (1,), (HALVES,), Evidence((7, 8), (0.0,)), (0.0,)).next_token_id == 7
    assert decide(Rule.REJECTION, (1,), (HALVES,), Evidence((7, 8), (0.5,)), (math.nextafter(1, 0),)).next_token_id == 8


def test_nothing_after_the_first_rejection_counts() -> None:
    """Claim: a later token that would pass is not looked at."""
    evidence = Evidence((7, 8, 9), (0.0, 1.0))
    assert decide(Rule.REJECTION, (0, 1), (HALVES, HALVES), evidence, (0.5, 0.0)) == Verdict(0, 7, TokenKind.CORRECTION)


def test_a_token_its_row_lacks_is_never_tested() -> None:
    """Claim: a draft probability of 0, which would pass every test, is refused by name."""
    with pytest.raises(InvalidRequest, match="draft token 3"):
        decide(Rule.REJECTION, (3,), (HALVES,), Evidence((7, 8), (0.5,)), (0.9,))


def test_parts_that_do_not_fit_are_refused() -> None:
    """Claim: a round with a part too short or too long decides nothing, for every part."""
    whole = {"rows": (HALVES,), "evidence": Evidence((7, 8), (0.5,)), "accept_draws": (0.5,)}
    decide(Rule.REJECTION, (1,), **whole)
    for broken in [
        {"rows": ()},
        {"accept_draws": ()},
        {"evidence": Evidence((7,), (0.5,))},
        {"evidence": Evidence((7, 8, 9), (0.5,))},
        {"evidence": Evidence((7, 8))},
    ]:
        with pytest.raises(InvalidRequest):
            decide(Rule.REJECTION, (1,), **{**whole, **broken})


def test_the_rule_needs_no_torch() -> None:
    """Claim: the coordinator's rule and the noise import in a fresh process without torch."""
    code = "import coordinator.rejection, specdec.protocol.noise, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
