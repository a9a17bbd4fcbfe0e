"""Plans of policies: fixed ones follow their settings, `auto` fits the positions left and gives a reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from specdec.config import CoordinatorSettings
from specdec.policy.acceptance import Acceptance
from specdec.policy.draft_time import DraftTimes
from specdec.policy.fixed_policy import OFF_POLICY, FixedPolicy
from specdec.policy.goodput import Goodput
from specdec.policy.goodput_policy import GoodputPolicy
from specdec.policy.plans import catalogue
from specdec.policy.steps import StepTimes
from specdec.protocol.limits import DRAFT_LENGTH_LIMIT
from specdec.protocol.offer import make_offer
from specdec.protocol.plan import OFF_PLAN, Plan
from specdec.protocol.policy import Policy
from specdec.protocol.records import RoundRecord
from specdec.protocol.request import GenerationRequest, SamplingParams
from specdec.protocol.types import Proposer, Rule, TokenKind
from tests.protocol.test_offer import WIDE, Certain, grown, paths_of
from tests.support.fleets import MODEL, fleet_of
from tests.support.policy_cells import LENGTH_CAP, TARGET_S, FleetService, one
from tests.support.records import changed, round_record

SPARE_TOKENS = 100_000
SETTINGS = CoordinatorSettings(
    target=("localhost:1",), draft=("localhost:2",), tokenizer="none", speculation_policy="auto"
)

GREEDY = GenerationRequest(token_ids=(1,), sampling=SamplingParams(temperature=0))


def auto() -> GoodputPolicy:
    """Of a service that has just begun."""
    policy = FleetService(one(0.7)).policy(0)
    assert isinstance(policy, GoodputPolicy)
    return policy


def record_of(
    index: int,
    plan: Plan,
    offered: int,
    accepted: int,
    found: bool = True,
    wait_s: float = 0.0,
    step_s: float = TARGET_S,
) -> RoundRecord:
    """Round `index` of one session, one target step and a wait after the one before."""
    round_s = step_s + wait_s + 0.001
    start_s = 100 + index * round_s
    return round_record(
        index,
        plan,
        offered_count=offered,
        accepted_count=accepted,
        kept_count=accepted + 1,
        next_kind=TokenKind.BONUS if found else TokenKind.RECOVERED,
        was_looked_up=found,
        was_found=found,
        start_s=start_s,
        end_s=start_s + round_s,
        wait_s=wait_s,
        round_trip_s=round_s - wait_s,
        forward_s=step_s,
        rows=offered + 1,
    )


def test_plans_fit_the_positions_left() -> None:
    """Claim: a round commits one more than it accepts, so draft length, window and wait stay below the positions
    left; with one position left the plan is plain decoding."""
    policies: list[Policy] = [FixedPolicy(3), FixedPolicy(16, 32, 8, 0.0), auto()]
    for policy in policies:
        for positions_left in range(1, 70):
            plan = policy.plan(positions_left)
            assert max(plan.draft_length_max, plan.window, plan.wait_length) <= positions_left - 1, (policy, plan)
            assert plan.draft_length_max <= min(policy.draft_length_cap, plan.window)
        assert policy.plan(1) == OFF_PLAN


def test_fixed_policies_follow_their_settings() -> None:
    """Claim: a draft length alone waits for all its tokens and drafts one further; given values are kept; 0 is off."""
    assert FixedPolicy(3, wait_s=0.1).plan(SPARE_TOKENS) == Plan(3, 4, 1, 3, 0.1)
    assert FixedPolicy(16, 32, 8, 0.0).plan(SPARE_TOKENS) == Plan(16, 32, 8)
    assert FixedPolicy(64).plan(SPARE_TOKENS).window == DRAFT_LENGTH_LIMIT
    assert (
        OFF_POLICY.plan(SPARE_TOKENS) == OFF_PLAN and OFF_POLICY.draft_length_cap == 0 and not OFF_POLICY.is_speculating
    )


def test_a_shrunk_plan_keeps_its_draft() -> None:
    """Claim: with fewer draft tokens a plan's window stays at least one token, though it is shorter than a round, and
    a plan without a draft stays without one. (A window below 0 has no message.)"""
    for length in range(1, 9):
        assert 1 <= Plan(8, 2, 4, siblings=2).shrunk(length).window <= 2
        assert Plan(8, 0).shrunk(length) == Plan(length, 0)


def test_heads_are_asked_while_their_tokens_are_accepted() -> None:
    """Claim: heads that no round accepts are asked in every 64th round only; one such round whose tokens are accepted
    brings them back. Rounds that had none of their tokens count for neither."""
    goodput = Goodput(StepTimes(), DraftTimes(), Acceptance(), LENGTH_CAP, catalogue(True, True))
    policy, accepted = GoodputPolicy(goodput, LENGTH_CAP), (Proposer.HEADS,) * 3

    def told(index: int, had_heads: bool, proposers: tuple[Proposer, ...] = (Proposer.DRAFT,) * 3) -> bool:
        record = record_of(index, policy.plan(SPARE_TOKENS), 3, 3)
        policy.on_round(changed(record, had_heads=had_heads, accepted_proposers=proposers))
        return policy.wants_heads

    asked = [told(index, had_heads=True) for index in range(1, 257)]
    assert asked[0] and 1 <= sum(asked[64:256]) <= 3
    assert not told(257, had_heads=False) and not told(258, had_heads=False, proposers=accepted)
    assert told(259, had_heads=True, proposers=accepted)


@pytest.mark.parametrize(
    "head_share, accepted, is_asked",
    [(0.02, 1, True), (0.15, 1, False), (0.15, 3, True)],
    ids=["cheap", "expensive", "expensive and good"],
)
def test_heads_are_asked_while_their_tokens_are_worth_their_time(
    head_share: float, accepted: int, is_asked: bool
) -> None:
    """Claim: heads of which every second round accepts one token are asked if they take 0.02 of a step, and not if
    they take 0.15, unless each of those rounds accepts three. The target told that time at its start.

    Conclusive: the records of the first two cases are equal, and so are the times that the target told in the last
    two. At 4 to 5 tokens a step, 0.15 of a step is worth 0.6 to 0.9 of a token, which is between both acceptances.
    """
    step_times, head_times = ([(rows, share * TARGET_S) for rows in (1, 16)] for share in (1.0, head_share))
    fleet = fleet_of(SETTINGS, replace(MODEL, step_times=tuple(step_times), head_times=tuple(head_times)))
    policy = fleet.choose(GREEDY, 1, MODEL).policy
    asked = []
    for index in range(1, 128):
        proposers = (Proposer.HEADS,) * accepted * (index % 2)
        record = record_of(index, policy.plan(SPARE_TOKENS), 3, 3)
        policy.on_round(changed(record, had_heads=True, accepted_proposers=proposers))
        asked.append(policy.wants_heads)
    assert set(asked[64:]) == {is_asked}


def test_the_time_of_heads_goes_by_sessions_not_rows() -> None:
    """Claim: heads have one row a session, so one session whose rounds have four rows pays the time of one row.
    Conclusive: the time of four would be more than their tokens are worth (the case "expensive" above)."""
    times = {
        "step_times": tuple((rows, TARGET_S) for rows in (1, 16)),
        "head_times": ((1, 0.02 * TARGET_S), (4, 0.5 * TARGET_S)),
    }
    fleet = fleet_of(SETTINGS, replace(MODEL, **times))
    policy = fleet.choose(GREEDY, 1, MODEL).policy
    for index in range(1, 128):
        record = record_of(index, policy.plan(SPARE_TOKENS), 3, 3)
        policy.on_round(changed(record, had_heads=True, accepted_proposers=(Proposer.HEADS,) * (index % 2)))
        assert policy.wants_heads or index < 64


@pytest.mark.parametrize(
    "row_share, tokens",
    [(0.0, {(1,), (1, 1), (2,), (2, 1)}), (0.2, {(1,), (1, 1)}), (0.33, {(1,)})],
    ids=["flat", "steep", "steeper"],
)
def test_steep_times_shrink_a_tree_to_a_chain(row_share: float, tokens: set[tuple[int, ...]]) -> None:
    """Claim: where each row takes a fifth of a step a tree is offered as its chain, where it takes a third, as one
    token; where rows cost nothing the likely branches are offered too."""
    steps = StepTimes()
    steps.prime(tuple((rows, TARGET_S * (1 + row_share * (rows - 1))) for rows in (1, 2, 4, 8, 16)))
    reach_min, path_reach_min = Goodput(steps, DraftTimes(), Acceptance(), LENGTH_CAP).reach_min(2.0 / TARGET_S)
    limits = WIDE._replace(reach_min=reach_min, path_reach_min=path_reach_min)
    found = set(paths_of(make_offer(grown().root, [], Rule.GREEDY, limits, Certain())))
    assert found == tokens if row_share else found > tokens


def test_it_gives_its_reason_in_numbers() -> None:
    """Claim: the reason is one line with two rates: that of the plan in force, and that of plain decoding, or, where
    that is in force, of the best plan of the draft."""
    reason = auto().prediction.reason
    assert re.fullmatch(r"a (chain|tree) .*: \d+ tokens/s predicted; off: 5\d", reason), reason
    slow = FleetService(one(0.7, draft_s=10 * TARGET_S)).policy(0)
    assert isinstance(slow, GoodputPolicy)
    assert re.fullmatch(r"off: 5\d tokens/s predicted; a (chain|tree) .*: \d+", slow.prediction.reason)


def test_decisions_depend_on_counts_alone() -> None:
    """Claim (docs/exactness.md): two sessions with the same counts and times make the same plans, for any next
    tokens. Conclusive: everything else in a record differs between the two, and plans are compared each round. (Each
    round with a plan for draft tokens tests some; without, it counts that the draft had the next one, see below.)"""
    policies = auto(), auto()
    for index in range(400):
        plan = policies[0].plan(SPARE_TOKENS)
        offered = min(4, plan.draft_length_max)
        accepted = min(offered, index * 7 % 5)
        for policy, found in zip(policies, (True, False)):
            policy.on_round(record_of(index, plan, offered, accepted, found))
        assert policies[0].plan(SPARE_TOKENS) == policies[1].plan(SPARE_TOKENS)
        assert policies[0].prediction == policies[1].prediction


def test_a_text_whose_rounds_wait_longer_leaves_a_waiting_plan() -> None:
    """Claim: two texts of one table whose rounds accept a token each: the first, whose rounds wait for nothing, runs a
    waiting plan to its end; the second, whose rounds wait for two target steps, leaves it within 40 rounds.

    Source: the mean wait of all texts predicted 97 tokens per second for a text that got 66. Conclusive: only the waits
    of the two differ, and in the mean of all rounds those of the second are too few for a change of plan.
    """
    wait_s = 2 * TARGET_S
    draft, waiting = DraftTimes(), Plan(6, 16, 8, 2)
    draft.on_network(wait_s)
    steps = StepTimes()
    steps.prime(((1, TARGET_S), (16, 1.3 * TARGET_S)))
    table = Goodput(steps, draft, Acceptance(), LENGTH_CAP, (OFF_PLAN, waiting))

    def wait_lengths(indices: range, wait_s: float) -> list[int]:
        policy = GoodputPolicy(table, LENGTH_CAP)
        plans = []
        for index in indices:
            plans.append(policy.plan(SPARE_TOKENS))
            offered = min(2, plans[-1].draft_length_max)
            its_wait_s = wait_s if plans[-1].wait_length else 0.0
            policy.on_round(record_of(index, plans[-1], offered, min(1, offered), wait_s=its_wait_s))
        return [plan.wait_length for plan in plans]

    first, second = wait_lengths(range(1, 151), 0.0), wait_lengths(range(201, 241), wait_s)
    assert first.count(2) > 100 and first[-1] == 2
    assert second[0] == 2 and second[-5:] == [0] * 5


def test_a_plan_stands_between_rounds() -> None:
    """Claim: between two rounds a policy gives the same plan each time."""
    policy = auto()
    for index in range(200):
        plan = policy.plan(SPARE_TOKENS)
        assert policy.plan(SPARE_TOKENS) == plan
        policy.on_round(record_of(index, plan, min(2, plan.draft_length_max), 0))


def test_rounds_of_other_plans_do_not_count() -> None:
    """Claim: rounds sent under a plan that is no longer in force change no estimate of the one in force. Conclusive:
    a hundred rounds whose times and steps are as expected, with nothing accepted; the same under its own plan change
    it."""
    for is_own in (False, True):
        policy = auto()
        rate, own = policy.prediction.tokens_per_s, policy.plan(SPARE_TOKENS)
        assert rate is not None
        other = replace(own, draft_length_max=LENGTH_CAP - 3)
        for index in range(1, 100):
            policy.on_round(record_of(index, own if is_own else other, 4, 0, step_s=1.08 * TARGET_S))
        found = next(each for each in policy._goodput.candidates if each.plan == replace(own, wait_s=0.0))
        assert (found.rounds > 1) == is_own


@pytest.mark.parametrize(("local_every", "share"), [(0, 0.3), (3, 0.5)])
def test_a_draft_whose_tokens_are_never_offered_is_seldom_tried(local_every: int, share: float) -> None:
    """Claim: where a draft slows the target's steps by 6 % and none of its tokens is worth a row, three rounds in ten
    draft at most, from the thousandth on; five where an n-gram's token is accepted in every third, which is not the
    draft's merit. Without the comparison of all plans with the formulas nearly all rounds draft: each of 14 plans has
    to be found out by itself, and is forgotten meanwhile."""
    steps, draft, drafted, now_s = StepTimes(), DraftTimes(), 0, 100.0
    steps.prime(tuple((rows, TARGET_S) for rows in (1, 2, 4, 8, 16)))
    draft.prime(((1, 0.001), (8, 0.002)))
    policy = GoodputPolicy(
        Goodput(steps, draft, Acceptance(), LENGTH_CAP, catalogue(True, bool(local_every))), LENGTH_CAP
    )
    for index in range(1, 4001):
        plan = policy.plan(SPARE_TOKENS)
        is_drafting = plan.window > 0
        local = (Proposer.NGRAM,) if local_every and index % local_every == 0 else ()
        own_s = TARGET_S * (1.06 if is_drafting else 1.0)
        record = record_of(index, plan, len(local), len(local), found=not is_drafting, step_s=own_s)
        sources = {"proposers": local, "accepted_proposers": local, "local_accepted_count": len(local)}
        policy.on_round(changed(record, start_s=now_s, end_s=now_s + record.times.round_s, **sources))
        now_s += record.times.round_s
        drafted += is_drafting and index > 1000
    assert 0 < drafted <= 3000 * share


def test_a_draft_without_the_next_token_loses_its_promise_though_nothing_is_tested() -> None:
    """Claim: where the calibration withholds all tokens of a draft that slows the target's steps by 6 %, the second
    text drafts in less than half of its rounds; the acceptance of the draft falls below 0.3 if it never had the next
    token, and rises if it always had.

    Source: a draft of wrong tokens kept 0.93 of plain decoding's throughput: nothing was tested, so that one plan after
    another ran at the promise of the formulas. Conclusive: the records of both cases differ in `was_found` alone.
    """

    def drafted_rounds(has_token: bool) -> tuple[int, float]:
        steps, draft, drafted, now_s = StepTimes(), DraftTimes(), [0, 0], 100.0
        steps.prime(tuple((rows, TARGET_S) for rows in (1, 2, 4, 8, 16)))
        draft.prime(((1, 0.001), (8, 0.002)))
        table = Goodput(steps, draft, Acceptance(), LENGTH_CAP, catalogue(True, False))
        for text in range(2):
            policy = GoodputPolicy(table, LENGTH_CAP)
            for index in range(160):
                plan = policy.plan(SPARE_TOKENS)
                is_drafting = plan.window > 0
                record = record_of(index, plan, 0, 0, step_s=TARGET_S * (1.06 if is_drafting else 1.0))
                looked_up = {"was_looked_up": is_drafting, "was_found": is_drafting and has_token}
                policy.on_round(changed(record, start_s=now_s, end_s=now_s + record.times.round_s, **looked_up))
                now_s += record.times.round_s
                drafted[text] += is_drafting
        return drafted[1], table.acceptance.value

    never, always = drafted_rounds(has_token=False), drafted_rounds(has_token=True)
    assert never[0] < 80 and never[1] < 0.3 and always[1] > 0.65


def test_refused_guesses_of_others_say_nothing_of_the_draft() -> None:
    """Claim: a text's acceptance level falls by refused tokens of the draft, and not by those of heads beside it.

    Source: with heads that guess little, texts left a draft at 1.9 times plain decoding for smaller plans. Conclusive:
    the records of both policies differ in the proposer of the refused token alone.
    """
    levels = {}
    for proposer in (Proposer.DRAFT, Proposer.HEADS):
        policy = auto()
        levels[proposer] = [policy._acceptance.value]
        for index in range(1, 21):
            record = record_of(index, policy._plan, 1, 0, found=False)
            policy.on_round(changed(record, proposers=(proposer,)))
        levels[proposer].append(policy._acceptance.value)
    assert levels[Proposer.HEADS][1] == levels[Proposer.HEADS][0]
    assert levels[Proposer.DRAFT][1] < levels[Proposer.DRAFT][0] - 0.1


def test_local_proposers_rest_where_the_text_does_not_repeat() -> None:
    """Claim: without a draft, a text that does not repeat asks the coordinator's own proposers in a tenth of its rounds
    at most, from the hundredth on; a text of whose rounds every third accepts a guess asks in nearly all. A round that
    asks takes 50 us longer.

    Source: they were asked in every round, at 20 to 30 % of the throughput of eight streams. Conclusive: the records of
    both texts differ in the accepted guess alone.
    """
    for accepts, low, high in ((False, 0.0, 0.1), (True, 0.9, 1.0)):
        steps, asked, now_s = StepTimes(), 0, 100.0
        steps.prime(tuple((rows, TARGET_S) for rows in (1, 2, 4, 8, 16)))
        policy = GoodputPolicy(
            Goodput(steps, DraftTimes(), Acceptance(), LENGTH_CAP, catalogue(False, True)), LENGTH_CAP
        )
        for index in range(1, 1101):
            plan = policy.plan(SPARE_TOKENS)
            is_asked = policy.wants_local and plan.draft_length_max > 0
            count = int(is_asked and accepts and index % 3 == 0)
            sources = {"proposers": (Proposer.NGRAM,) * count, "accepted_proposers": (Proposer.NGRAM,) * count}
            record = record_of(index, plan, count, count, wait_s=5e-5 * is_asked)
            times = {"start_s": now_s, "end_s": now_s + record.times.round_s, "local_accepted_count": count}
            policy.on_round(changed(record, **sources, **times))
            now_s += record.times.round_s
            asked += is_asked and index > 100
        assert low <= asked / 1000 <= high


def test_local_proposers_rest_beside_a_draft_too() -> None:
    """Claim: beside a draft they are asked in every 64th round where none of their guesses is accepted, and in all
    rounds after one in which three were. Conclusive: both within one text."""
    fleet = FleetService(one(0.7)).fleet
    steps, times = fleet.targets.peers[0].steps[Rule.GREEDY], fleet.drafts.peers[0].times[Rule.GREEDY]
    plans = catalogue(True, True)
    policy = GoodputPolicy(Goodput(steps, times, Acceptance(), LENGTH_CAP, plans), LENGTH_CAP)
    asked = []
    for index in range(1, 256):
        accepted = (Proposer.NGRAM if index >= 192 and policy._asks_local else Proposer.DRAFT,) * 3
        record = record_of(index, policy.plan(SPARE_TOKENS), 3, 3)
        policy.on_round(changed(record, proposers=accepted, accepted_proposers=accepted))
        asked.append(policy.wants_local)
    assert sum(asked[100:190]) <= 2 and all(asked[196:])


def test_after_a_jump_all_sessions_decode_plainly_for_a_while() -> None:
    """Claim: a session that drafts when the target's steps jump decodes plainly at once, with its budget spent.
    Conclusive: before the jump, with the same budget, it goes on drafting."""
    policy = auto()
    index = 1

    def take(step_s: float, count: int) -> list[Plan]:
        nonlocal index
        plans = []
        for _ in range(count):
            policy._goodput.credit_s = -1.0
            policy.on_round(record_of(index, policy.plan(1000), 4, 3, step_s=step_s))
            plans.append(policy.plan(1000))
            index += 1
        return plans

    assert policy.plan(1000).window and OFF_PLAN not in take(TARGET_S, 60)
    assert take(20 * TARGET_S, 2)[-1] == OFF_PLAN


def test_an_exploration_is_paid_when_it_begins() -> None:
    """Claim: what an exploration is expected to lose is taken from the budget at its first round, so texts that end in
    its midst do not explore again and again for nothing. Conclusive: none of its rounds is over when the credit is
    read, and it is expected to lose: all of the draft's tokens were wrong so far."""
    policy = auto()
    goodput = policy._goodput
    for index in range(1, 5000):
        plan, credit_s = policy.plan(1000), goodput.credit_s
        policy.on_round(record_of(index, plan, 4 * bool(plan.window), 0))
        if not plan.window and policy.plan(1000).window and policy._rates[policy._own] < policy._rates[goodput.off]:
            break
    assert policy._exploring_until
    assert credit_s - goodput.credit_s > 0.9 * policy._loss_s(policy._own, goodput.off) > 0.001
