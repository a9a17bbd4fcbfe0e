"""The policies: fixed ones by their plans, the choosing one in a closed loop with the event simulation.

In the loop the policy sees what a session would tell it and nothing else: counts and seconds of rounds, times of steps.
"""

from __future__ import annotations

import pytest

from bench.event_simulation import Node, Scenario, Simulation, Stream, simulate
from specdec.errors import InvalidRequest
from specdec.policy.plan import PLAIN, Plan
from specdec.policy.policy import OFF_POLICY, FixedPolicy, Policy
from specdec.protocol.auto_policy import BACKOFF_TOKENS_MAX, PROBE_ROUNDS, PROBE_TOKENS, SEARCH_ROUNDS, AutoPolicy
from specdec.protocol.measure import Measurements
from specdec.protocol.types import DRAFT_LENGTH_LIMIT, Rule

pytestmark = pytest.mark.lengthy

ROOM = 100_000
TARGET_S, OVERHEAD_S = 0.02, 0.001


def world(draft: float = 0.1, acceptance: float = 0.7, trip: float = 0.5, bonus_match: float | None = None) -> Scenario:
    """Times in target steps."""
    return Scenario(
        target_step_s=lambda rows: TARGET_S * (1 + 0.01 * (rows - 1)),
        draft_step_s=lambda leaves: draft * TARGET_S * (1 + 0.1 * (leaves - 1)),
        network_s=trip * TARGET_S,
        acceptance=(acceptance,),
        bonus_match=bonus_match,
        round_overhead_s=OVERHEAD_S,
    )


class Driven(Simulation):
    """A simulated stream whose plan a policy makes. Steps take `plain_share` of their time while the draft rests."""

    def __init__(self, scenario: Scenario, policy: Policy, told: Measurements, seed: int, plain_share: float) -> None:
        super().__init__(scenario, policy.plan(ROOM), seed)
        self._policy, self._told, self._plain_share = policy, told, plain_share
        self._offered_count = self._accepted_count = 0
        self._verdict_s = self._sent_s = 0.0

    def _target_step(self) -> None:
        batch, self.verified = self.verified, []
        self.target_is_busy = bool(batch)
        for _, self._offered_count in batch:
            drafting = self._policy.is_speculating
            step_s = self.scenario.target_step_s(self._offered_count + 1) * (1.0 if drafting else self._plain_share)
            step_s = self.draws.around(step_s, self.scenario.step_jitter)
            self._told.on_target_step(self._offered_count + 1, step_s, drafting)
            self._told.round_overhead.add(self.scenario.round_overhead_s)
            self._told.network.add(self.scenario.network_s)
            self._after(step_s, lambda: self._conclude(batch))

    def _commit(self, stream: Stream, ranks: list[int]) -> None:
        self._accepted_count = len(ranks) - 1
        super()._commit(stream, ranks)

    def _verify(self, stream: Stream) -> None:
        if self.round_count:
            stream.path_length(self.now_s, DRAFT_LENGTH_LIMIT)  # goes as far along the committed tokens as has arrived
            hit = None if self.plan.leaves == 1 else not stream.ahead
            round_s, self._verdict_s = self.now_s - self._verdict_s, self.now_s
            self._policy.on_round(self._offered_count, self._accepted_count, hit, round_s)
            self.plan = self._policy.plan(ROOM)
        super()._verify(stream)

    def _drafted(self, chosen: list[tuple[Stream, Node]]) -> None:
        self._told.on_draft_step(len(chosen), self.scenario.draft_step_s(len(chosen)))
        super()._drafted(chosen)


def service(
    scenario: Scenario, told: Measurements, sessions: int = 8, seed: int = 0, rule=Rule.GREEDY, plain_share: float = 1.0
) -> tuple[float, AutoPolicy]:
    """Tokens per second of some sessions of 300 tokens, one after the other, and the last one's policy."""
    tokens = seconds = 0.0
    for number in range(sessions):
        policy = AutoPolicy(told, rule, 16)
        run = Driven(scenario, policy, told, seed + number, plain_share)
        run.run(300)
        tokens += run.streams[0].committed_count
        seconds += run.now_s
    return tokens / seconds, policy


def off_rate(plain_share: float = 1.0) -> float:
    return 1 / (TARGET_S * plain_share + OVERHEAD_S)


def test_fixed_plans_fit_the_room() -> None:
    """Claim: a round commits one more than it accepts, so neither draft length nor window nor wait reaches the room;
    with room for one token the plan is plain decoding."""
    policies: list[Policy] = [FixedPolicy(3), FixedPolicy(16, 32, 8, 0.0), AutoPolicy(Measurements(), Rule.GREEDY, 16)]
    for policy in policies:
        for room in range(1, 70):
            plan = policy.plan(room)
            assert max(plan.draft_length_max, plan.window, plan.wait_length) <= room - 1, (policy, plan)
            assert plan.draft_length_max <= min(policy.draft_length_cap, plan.window)
        assert policy.plan(1) == PLAIN


def test_fixed_policies_do_what_they_are_told() -> None:
    """Claim: a draft length alone waits for all its tokens with a draft one ahead; what is named is kept; 0 is off."""
    assert FixedPolicy(3, wait_s=0.1).plan(ROOM) == Plan(3, 4, 1, 3, 0.1)
    assert FixedPolicy(16, 32, 8, 0.0).plan(ROOM) == Plan(16, 32, 8)
    assert FixedPolicy(64).plan(ROOM).window == DRAFT_LENGTH_LIMIT
    assert OFF_POLICY.plan(ROOM) == PLAIN and OFF_POLICY.draft_length_cap == 0 and not OFF_POLICY.is_speculating
    with pytest.raises(InvalidRequest):
        FixedPolicy(4, window=3)


@pytest.mark.parametrize(
    "draft, acceptance, trip", [(0.05, 0.8, 0.0), (0.1, 0.7, 0.5), (0.2, 0.8, 2.0), (0.1, 0.5, 1.0)]
)
def test_it_comes_near_the_best_fixed_plan(draft: float, acceptance: float, trip: float) -> None:
    """Claim: once a service has seen some sessions, the policy gets 0.95 of the best of eight streamed plans, its looks
    at plain decoding included. Conclusive: those plans are tried out, not predicted."""
    scenario, told = world(draft, acceptance, trip), Measurements()
    service(scenario, told)
    rate, policy = service(scenario, told, seed=100)
    plans = [Plan(cap, window, leaves) for cap in (4, 16) for window in (8, 16) for leaves in (1, 8)]
    best = max(simulate(scenario, plan, 1500) for plan in plans)
    assert rate >= 0.95 * best, (rate * TARGET_S, best * TARGET_S, policy.prediction)


@pytest.mark.parametrize(
    "draft, acceptance, trip", [(0.1, 0.2, 2.0), (0.6, 0.3, 1.0), (1.5, 0.8, 0.0), (0.2, 0.5, 5.0)]
)
@pytest.mark.parametrize("rule, bonus_match", [(Rule.GREEDY, None), (Rule.REJECTION, 0.2)])
def test_it_is_not_slower_than_off(draft: float, acceptance: float, trip: float, rule: Rule, bonus_match) -> None:
    """Claim (performance.md): where speculation gains nothing, a service is at most 2 % slower than off from its first
    session on. Conclusive: a draft that is slow, bad or far, and everything counts, trials too."""
    rate, policy = service(world(draft, acceptance, trip, bonus_match), Measurements(), rule=rule)
    assert rate >= 0.98 * off_rate(), policy.prediction


def test_it_sees_that_the_draft_slows_the_target() -> None:
    """Claim: where drafting takes the target's cores and the target alone is a third faster, off is judged by rounds
    without a draft: what would gain 35 % otherwise is switched off, what doubles the speed is not."""
    weak, strong = world(0.1, 0.5, 1.0), world(0.1, 0.8, 0.25)
    rate, policy = service(weak, Measurements(), plain_share=0.7)
    assert not policy.is_speculating and rate >= 0.98 * off_rate(0.7)
    assert service(weak, Measurements())[0] > 1.2 * off_rate()
    rate, policy = service(strong, Measurements(), plain_share=0.7)
    assert policy.is_speculating and rate > 1.3 * off_rate(0.7)


def test_it_switches_off_when_the_text_changes_and_on_again() -> None:
    """Claim: a session whose draft becomes useless stops using it, and finds out when it is good again. Conclusive: one
    service, three texts; in the third it is back at 0.9 of what it had in the first."""
    told = Measurements()
    good, bad = world(0.3, 0.8, 1.0), world(0.3, 0.05, 1.0)
    before, _ = service(good, told)
    during, policy = service(bad, told, seed=50)
    assert not policy.is_speculating and during >= 0.95 * off_rate()
    service(good, told, seed=100)
    after, policy = service(good, told, seed=150)
    assert policy.is_speculating and after >= 0.9 * before


def test_what_it_predicts_is_what_comes() -> None:
    """Claim (performance.md): observed over predicted tokens per second is 0.9 to 1.1."""
    for draft, acceptance, trip in ((0.1, 0.7, 0.5), (0.05, 0.8, 0.1), (0.2, 0.6, 1.0)):
        scenario, told = world(draft, acceptance, trip), Measurements()
        service(scenario, told)
        rate, policy = service(scenario, told, sessions=16, seed=100)
        predicted = policy.prediction.tokens_per_s
        assert predicted is not None and 0.9 <= rate / predicted <= 1.1, (rate, policy.prediction)


def test_it_says_why_in_numbers() -> None:
    """Claim: one line with the plan, what is predicted of it and of off; or that nothing is measured yet."""
    told = Measurements()
    first = AutoPolicy(told, Rule.GREEDY, 16)
    assert "plain rounds" in first.prediction.reason and first.plan(ROOM) == PLAIN
    _, policy = service(world(), told, sessions=3)
    reason = policy.prediction.reason
    assert "tree of" in reason and "tokens/s predicted; off 4" in reason and "\n" not in reason
    _, policy = service(world(1.5, 0.1, 5.0), Measurements(), sessions=3)
    assert policy.prediction.reason.startswith("off: 4")


def steady(policy: AutoPolicy, rounds: int, told: Measurements, gain: float) -> list[bool]:
    """Rounds of one token each, `gain` times as fast with a draft as without; returns of each whether it drafts."""
    drafts = []
    for _ in range(rounds):
        drafting = policy.is_speculating
        drafts.append(drafting)
        round_s = TARGET_S / (gain if drafting else 1.0)
        told.on_target_step(1, TARGET_S, drafting)
        told.on_draft_step(1, 0.001)
        told.network.add(0.001)
        policy.on_round(int(drafting), 0, None, round_s)
    return drafts


def test_it_tries_again_less_and_less_often() -> None:
    """Claim: observation overrules the model: a draft whose rounds take longer than predicted is rested; rests double
    from 64 to 1024 tokens, so trials cost less and less. Conclusive: lengths of all rests are counted."""
    told = Measurements()
    policy = AutoPolicy(told, Rule.GREEDY, 16)
    drafts = steady(policy, 6000, told, gain=0.8)
    edges = [index for index in range(1, len(drafts)) if drafts[index] != drafts[index - 1]]
    rests = [end - begin for begin, end in zip(edges, edges[1:]) if not drafts[begin]]
    assert rests[-1] >= BACKOFF_TOKENS_MAX and all(b >= a or b >= BACKOFF_TOKENS_MAX for a, b in zip(rests, rests[1:]))
    assert sum(drafts[1000:]) < 0.03 * len(drafts[1000:])


def test_a_new_session_of_a_service_that_rests_begins_at_rest() -> None:
    """Claim: what one session found out, the next one need not: it starts with plain decoding, and without a look at
    plain rounds, which are known."""
    told = Measurements()
    steady(AutoPolicy(told, Rule.GREEDY, 16), 3000, told, gain=0.8)
    assert not any(steady(AutoPolicy(told, Rule.GREEDY, 16), 64, told, gain=0.8))


def test_short_texts_do_not_rest_for_ever() -> None:
    """Claim: rests are the service's, not each session's: where texts are shorter than a rest, the first session that
    begins after it tries at once. Sessions of 40 tokens and a rest of 100: two rest, one of the next two tries."""
    told = Measurements()
    steady(AutoPolicy(told, Rule.GREEDY, 16), 3000, told, gain=0.8)
    told.rest_until[Rule.GREEDY] = told.token_count + 100
    tried = [any(steady(AutoPolicy(told, Rule.GREEDY, 16), 40, told, gain=0.8)) for _ in range(4)]
    assert not any(tried[:2]) and any(tried[2:])


def test_looks_at_plain_decoding_are_short_and_rare() -> None:
    """Claim: six rounds when a service begins and six in two thousand tokens after, whatever the number of sessions.
    Conclusive: sessions that gain two tokens a round make every plain round a look, and all are counted."""
    told, looks = Measurements(), []
    for _ in range(40):
        policy = AutoPolicy(told, Rule.GREEDY, 16)
        for _ in range(100):
            looks.append(not policy.is_speculating)
            told.on_target_step(1, TARGET_S, policy.is_speculating)
            told.on_draft_step(1, 0.001)
            told.network.add(0.001)
            offered = 2 * policy.is_speculating
            policy.on_round(offered, offered, None, TARGET_S)
    tokens = len(looks) + 2 * (len(looks) - sum(looks))
    assert looks[:PROBE_ROUNDS] == [True] * PROBE_ROUNDS
    assert 2 * PROBE_ROUNDS <= sum(looks) <= PROBE_ROUNDS * (1 + tokens / PROBE_TOKENS), sum(looks)


def test_a_draft_that_was_away_is_used_again_at_once() -> None:
    """Claim: rounds in which nothing came do not count against the plan: after an hour without a draft the service is
    as fast as before. Conclusive: the same rounds counted as bad ones would halve what is predicted."""
    scenario, told = world(0.1, 0.7, 0.5), Measurements()
    service(scenario, told)
    before, _ = service(scenario, told, seed=50)
    policy = AutoPolicy(told, Rule.GREEDY, 16)
    for _ in range(2000):
        told.on_target_step(1, TARGET_S, policy.is_speculating)
        policy.on_round(0, 0, None, TARGET_S + OVERHEAD_S)
    after, policy = service(scenario, told, seed=50)
    assert policy.is_speculating and after >= 0.95 * before


def test_decisions_depend_on_counts_alone() -> None:
    """Claim (docs/exactness.md): two sessions with the same counts and times make the same plans, so no drawn token can
    bend a law through the policy. Conclusive: `on_round` is told nothing else, and plans are compared after each."""
    told = Measurements(), Measurements()
    policies = [AutoPolicy(each, Rule.REJECTION, 16) for each in told]
    for index in range(400):
        for each, policy in zip(told, policies):
            each.on_target_step(1 + index % 5, 0.02, policy.is_speculating)
            each.on_draft_step(4, 0.002)
            each.network.add(0.01)
            accepted = (index * 7 % 5) * policy.is_speculating
            policy.on_round(4 * policy.is_speculating, accepted, index % 3 > 0, 0.02)
        assert policies[0].plan(ROOM) == policies[1].plan(ROOM)
        assert policies[0].prediction == policies[1].prediction


def test_many_sessions_think_as_little_as_one() -> None:
    """Claim: the model is asked about once in CHOOSE_ROUNDS rounds of the whole service, however many sessions there
    are, and they all follow what one of them found. Counted at the search itself over 16 sessions; 16 on their own
    would ask about sixteen times as often."""
    asked = 0
    measurements = Measurements()
    real = measurements.choosers[Rule.GREEDY].choose

    def choose(*arguments):
        nonlocal asked
        asked += 1
        return real(*arguments)

    measurements.choosers[Rule.GREEDY].choose = choose
    policies = [AutoPolicy(measurements, Rule.GREEDY, 16) for _ in range(16)]
    measurements.network.add(0.002)
    measurements.round_overhead.add(0.001)
    round_count = 400
    for index in range(round_count):
        for policy in policies:
            offered = 3 if policy.is_speculating else 0
            measurements.on_target_step(16 * (offered + 1), 0.02, bool(offered), 16, 16)
            measurements.on_draft_step(16, 0.003)
            policy.on_round(offered, min(offered, index % 4), index % 3 > 0, 0.021)
    assert 0 < asked < 2 * round_count / SEARCH_ROUNDS
    assert len({policy.plan(100) for policy in policies}) <= 2, "all follow, but for those about to ask"
