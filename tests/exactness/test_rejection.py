"""The rule itself: acceptance, the next token, and refusals."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest

from specdec.errors import InvalidRequest
from specdec.protocol.rejection import decide
from specdec.protocol.types import DraftProbs, Rule, SamplerOutput, TokenKind, Verdict

HALVES = DraftProbs((0, 1), (1, 1))


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
def test_equality_rules(rule: Rule) -> None:
    """Claim: draft tokens pass while they equal the target's; then the recovered token follows, or the bonus token."""
    output = SamplerOutput((4, 5, 6))
    assert decide(rule, (4, 5), (), output, ()) == Verdict((0, 1), 6, TokenKind.BONUS)
    assert decide(rule, (4, 0), (), output, ()) == Verdict((0,), 5, TokenKind.RECOVERED)
    assert decide(rule, (0, 5), (), output, ()) == Verdict((), 4, TokenKind.RECOVERED)
    assert decide(rule, (), (), SamplerOutput((9,)), ()) == Verdict((), 9, TokenKind.BONUS)


def test_the_test_is_strict() -> None:
    """Claim: accept when u * draft_prob < target_prob, strictly. Conclusive: both sides of a border that is exact in
    float64 (draft 1/2, target 1/4, border u = 1/2), and target probability 0, which passes for no u, not even 0.
    """
    for draw, accepted in [(0.0, 1), (math.nextafter(0.5, 0), 1), (0.5, 0), (math.nextafter(1, 0), 0)]:
        verdict = decide(Rule.REJECTION, (1,), (HALVES,), SamplerOutput((7, 8), (0.25,)), (draw,))
        assert verdict.accepted_count == accepted
    assert decide(Rule.REJECTION, (1,), (HALVES,), SamplerOutput((7, 8), (0.0,)), (0.0,)).next_token_id == 7
    assert (
        decide(Rule.REJECTION, (1,), (HALVES,), SamplerOutput((7, 8), (0.5,)), (math.nextafter(1, 0),)).next_token_id
        == 8
    )


def test_nothing_after_the_first_rejection_counts() -> None:
    """Claim: a later token that would pass is ignored."""
    output = SamplerOutput((7, 8, 9), (0.0, 1.0))
    assert decide(Rule.REJECTION, (0, 1), (HALVES, HALVES), output, (0.5, 0.0)) == Verdict((), 7, TokenKind.RECOVERED)


def test_a_token_its_row_lacks_is_never_tested() -> None:
    """Claim: a draft probability of 0, which would pass every test, is refused by name."""
    with pytest.raises(InvalidRequest, match="draft token 3"):
        decide(Rule.REJECTION, (3,), (HALVES,), SamplerOutput((7, 8), (0.5,)), (0.9,))


def test_parts_that_do_not_fit_are_refused() -> None:
    """Claim: a round with a part too short or too long decides nothing, for every part."""
    whole = {"draft_probs": (HALVES,), "output": SamplerOutput((7, 8), (0.5,)), "accept_draws": (0.5,)}
    decide(Rule.REJECTION, (1,), **whole)
    for broken in [
        {"draft_probs": ()},
        {"accept_draws": ()},
        {"output": SamplerOutput((7,), (0.5,))},
        {"output": SamplerOutput((7, 8, 9), (0.5,))},
        {"output": SamplerOutput((7, 8))},
    ]:
        with pytest.raises(InvalidRequest):
            decide(Rule.REJECTION, (1,), **{**whole, **broken})


def test_the_rule_needs_no_torch() -> None:
    """Claim: the coordinator's rule and the noise import in a fresh process without torch."""
    code = "import specdec.protocol.rejection, specdec.protocol.noise, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
