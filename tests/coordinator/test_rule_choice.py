"""The rule of requests that leave it open: the service's choice, by what it measured."""

from __future__ import annotations

from coordinator.speculation import REJECTION_EVERY, RULE_ROUNDS, Speculation
from specdec.config import CoordinatorSettings
from specdec.policy.auto_policy import AutoPolicy
from specdec.protocol.report import RoundRecord
from specdec.protocol.request import Ask, SamplingPolicy, SpeculativePolicy
from specdec.protocol.types import Rule, TokenKind

SETTINGS = CoordinatorSettings(target="localhost:1", tokenizer="none", speculation_policy="auto")
OPEN = Ask(token_ids=(1,))


def run_rounds(speculation: Speculation, rule: Rule, round_s: float) -> None:
    """A generation under a rule whose rounds all take so long and accept all that is planned."""
    policy = speculation.policy(Ask(token_ids=(1,)), rule)
    assert isinstance(policy, AutoPolicy)
    for index in range(round(3 * RULE_ROUNDS)):
        plan = policy.plan(1000)
        count, start_s = plan.draft_length_max, index * round_s
        counts = count, count, count + 1, TokenKind.BONUS, True, True, 0, 0
        policy.on_round(RoundRecord(index, plan, *counts, start_s, start_s + round_s, 0.0, round_s, 0.0, round_s, 0.0))


def test_what_is_named_or_follows_is_not_chosen() -> None:
    """Claim: temperature 0 is GREEDY, a seed COUPLED, a rule named is that rule; each says why."""
    speculation = Speculation(SETTINGS)
    greedy = Ask(token_ids=(1,), sampling=SamplingPolicy(temperature=0))
    assert speculation.rule(greedy) == (Rule.GREEDY, "temperature 0")
    seeded = Ask(token_ids=(1,), sampling=SamplingPolicy(seed=3))
    assert speculation.rule(seeded) == (Rule.COUPLED, "the request has a seed")
    named = Ask(token_ids=(1,), speculative=SpeculativePolicy(rule=Rule.REJECTION))
    assert speculation.rule(named) == (Rule.REJECTION, "named by the request")


def test_a_small_share_runs_rejection_to_measure_it() -> None:
    """Claim: COUPLED until both rules were measured, but for one request in REJECTION_EVERY; none of a resumed text's
    parts needs a rule or a seed. Conclusive: all of four times as many requests are counted."""
    speculation = Speculation(SETTINGS)
    resumed = Ask(token_ids=(1,), resumed_token_ids=(2, 3))
    rules = [speculation.rule(resumed)[0] for _ in range(4 * REJECTION_EVERY)]
    assert rules.count(Rule.REJECTION) == 4 and rules.count(Rule.COUPLED) == len(rules) - 4
    assert rules[0] is Rule.COUPLED


def test_the_faster_rule_is_chosen() -> None:
    """Claim: once both are measured, the one that is worth more runs, and the reason gives both figures."""
    for rejection_s, chosen in ((0.01, Rule.REJECTION), (0.04, Rule.COUPLED)):
        speculation = Speculation(SETTINGS)
        run_rounds(speculation, Rule.COUPLED, 0.02)
        run_rounds(speculation, Rule.REJECTION, rejection_s)
        rule, reason = speculation.rule(OPEN)
        assert rule is chosen and "tokens/s measured" in reason, reason
