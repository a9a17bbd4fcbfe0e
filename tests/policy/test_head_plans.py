"""A feature head on the target as the drafter of a text: its plans, its times, the choice between it and a draft."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.config import CoordinatorSettings
from specdec.coordinator.fleet import MODEL_EVERY, RULE_ROUNDS
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import HeadTimes
from specdec.policy.goodput import Goodput
from specdec.policy.plans import catalogue
from specdec.policy.steps import StepTimes
from specdec.protocol.plan import LOCAL_PLAN, OFF_PLAN, Plan
from specdec.protocol.request import SpeculationMode
from specdec.protocol.types import Proposer, Rule
from tests.policy.test_policy import GREEDY, LENGTH_CAP, SPARE_TOKENS, TARGET_S, record_of
from tests.support.fleets import MODEL, fleet_of
from tests.support.records import changed

PASS_S = 0.1 * TARGET_S
HEADED = replace(
    MODEL,
    step_times=tuple((rows, TARGET_S) for rows in (1, 16)),
    head_passes_max=16,
    head_pass_times=((1, PASS_S), (16, 2 * PASS_S)),
)
WITH_DRAFT = CoordinatorSettings(
    target=("localhost:1",), draft=("localhost:2",), tokenizer="none", speculation_policy="auto"
)
ALONE = WITH_DRAFT.model_copy(update={"draft": ()})


def asked(mode: SpeculationMode, *proposers: Proposer, **more):
    return replace(GREEDY, speculative=replace(GREEDY.speculative, mode=mode, proposers=proposers, **more))


def test_without_a_draft_the_head_drafts() -> None:
    """Claim: a target that describes a feature head drafts with it for requests that may use heads, automatic ones at
    once, and those with a plan of their own by that plan, whose rounds wait for nothing; not for others, nor a target
    with heads of single positions."""
    fleet = fleet_of(ALONE, HEADED)
    choice = fleet.choose(GREEDY, 1, HEADED)
    assert choice.head_drafts and choice.draft is None
    plan = choice.policy.plan(SPARE_TOKENS)
    assert plan.window and not plan.wait_length and not plan.wait_s
    fixed = fleet.choose(asked(SpeculationMode.FIXED, Proposer.HEADS, num_speculative_tokens=3), 2, HEADED)
    assert fixed.head_drafts and fixed.policy.plan(SPARE_TOKENS) == Plan(3, 3)
    unnamed = asked(SpeculationMode.FIXED, num_speculative_tokens=2)
    assert fleet.choose(unnamed, 2, HEADED).policy.plan(SPARE_TOKENS) == Plan(2, 2)
    assert not fleet_of(WITH_DRAFT, HEADED, HEADED).choose(unnamed, 2, HEADED).head_drafts
    for request in (asked(SpeculationMode.AUTO, Proposer.NGRAM), asked(SpeculationMode.OFF)):
        other = fleet.choose(request, 3, HEADED)
        assert not other.head_drafts and not other.policy.plan(SPARE_TOKENS).window
    medusa = replace(MODEL, num_heads=3, head_times=((1, PASS_S),))
    single = fleet_of(ALONE, medusa).choose(GREEDY, 1, medusa)
    assert not single.head_drafts and single.policy.wants_heads and not single.policy.plan(SPARE_TOKENS).window


def test_the_head_and_a_draft_are_measured_and_the_better_is_used() -> None:
    """Claim: beside a draft the head is the other drafter of a rule: until it is measured every second request measures
    it, then the one with more tokens per second is used, whichever that is. Conclusive: the same rounds, of one token
    more or less, decide it both ways."""
    for is_head_better in (False, True):
        fleet = fleet_of(WITH_DRAFT, HEADED, HEADED)
        first = [fleet.choose(GREEDY, turn, HEADED).head_drafts for turn in range(64)]
        assert not first[0] and 64 / MODEL_EVERY / 2 < sum(first) < 64 / MODEL_EVERY * 1.5
        for turn in range(64):
            choice = fleet.choose(GREEDY, turn, HEADED)
            accepted, drafter = (3 if choice.head_drafts == is_head_better else 1), Proposer.DRAFT
            drafter = Proposer.HEADS if choice.head_drafts else drafter
            for index in range(1, int(RULE_ROUNDS) + 2):
                record = record_of(index, choice.policy.plan(SPARE_TOKENS), 3, accepted)
                proposers = {"proposers": (drafter,) * 3, "accepted_proposers": (drafter,) * accepted}
                choice.policy.on_round(changed(record, drafter=drafter, **proposers))
        last = [fleet.choose(GREEDY, turn, HEADED) for turn in range(65, 97)]
        assert sum(choice.head_drafts == is_head_better for choice in last) >= 31
        assert "the target's head" in last[0].rule_reason


@pytest.mark.parametrize("rule", Rule)
def test_plans_of_a_head(rule: Rule) -> None:
    """Claim: at most eight plans, plain decoding first, then own proposers; no plan waits; trees have siblings, where
    the service allows two, and under REJECTION they grow along first draws: one node a pass (docs/exactness.md)."""
    for siblings_max in (0, 1, 3):
        plans = catalogue(False, True, siblings_max, rule, with_head=True)
        assert plans[:2] == (OFF_PLAN, LOCAL_PLAN) and 6 <= len(plans) <= 8
        assert all(0 < plan.window <= 16 and not plan.wait_length for plan in plans[2:])
        trees = [plan for plan in plans if plan.siblings]
        assert len(trees) == 2 * (siblings_max == 3)
        assert all(plan.nodes_per_step > 1 for plan in plans[2:] if plan not in trees) is False
        assert all((plan.nodes_per_step == 1) == (rule is Rule.REJECTION) for plan in trees)


def test_passes_are_a_part_of_the_round() -> None:
    """Claim: a plan of a head takes its passes beside the step, as the description says at first, and as results say
    then; a round without the head is not charged with the passes of other sessions of its step."""
    steps, times = StepTimes(), HeadTimes()
    steps.prime(HEADED.step_times)
    times.prime(HEADED.head_pass_times)
    goodput = Goodput(steps, times, Acceptance(), LENGTH_CAP, catalogue(False, False, 0, with_head=True))
    off, *chains = goodput.candidates
    passes = [own.forecast.wait_s / PASS_S for own in chains]
    assert passes == pytest.approx([own.plan.window for own in chains])
    assert chains[1].round_s - off.round_s == pytest.approx(2 * PASS_S)
    for index in range(1, 200):
        record = record_of(index, chains[1].plan, 2, 1)
        goodput.on_round(record._replace(step=record.step._replace(head_s=2 * 3 * PASS_S)))
    assert times.trip_s(Plan(2, 2), 1.0) == pytest.approx(6 * PASS_S, rel=0.05)
    record = record_of(200, OFF_PLAN, 0, 0)
    slow = record._replace(
        step=record.step._replace(head_s=PASS_S), times=record.times._replace(end_s=record.times.end_s + PASS_S)
    )
    goodput.measure(off, slow, Acceptance())
    assert off.beside_s.value == pytest.approx(record.times.round_s - record.step.step_s)
