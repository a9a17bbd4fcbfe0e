"""Sessions of one service at once: what they share, what each decides for itself, and what load does.

Policies are told what their sessions would tell them: steps of all that take part, and their own rounds.
"""

from __future__ import annotations

from specdec.protocol.auto_policy import AutoPolicy
from specdec.protocol.measure import Measurements
from specdec.protocol.types import Rule

ROOM = 100_000
OVERHEAD_S = 0.001


def told_of(network_s: float = 0.002) -> Measurements:
    """A service that knows its links and overhead."""
    measurements = Measurements()
    measurements.network.add(network_s)
    measurements.round_overhead.add(OVERHEAD_S)
    return measurements


def step_s(rows: int) -> float:
    """A target whose weights cost as much as eight rows do; beyond, every row costs."""
    return 0.02 + 0.004 * max(0, rows - 8)


def run_together(
    measurements: Measurements, policies: list[AutoPolicy], right: list[int], rounds: int, every: int = 1
) -> list[list[bool]]:
    """Rounds that all sessions share; each session's draft is right for so many tokens of one round in `every`, and for
    none of the others. For each session, when it speculated."""
    drafted: list[list[bool]] = [[] for _ in policies]
    count = len(policies)
    for number in range(rounds):
        offered = [policy.plan(ROOM).draft_length_max for policy in policies]
        rows = sum(length + 1 for length in offered)
        for index, policy in enumerate(policies):
            drafted[index].append(policy.is_speculating)
            measurements.on_target_step(rows, step_s(rows), policy.is_speculating, count, count)
            measurements.on_draft_step(2 * count, 0.003)
            accepted = min(offered[index], right[index] if number % every == 0 else 0)
            policy.on_round(offered[index], accepted, None, step_s(rows) + OVERHEAD_S)
    return drafted


def test_each_session_is_judged_by_its_own_text() -> None:
    """Claim: beside a session whose draft is always right one whose draft never is rests, and the first goes on.

    Conclusive: the two share steps, measurements and plans, so that either would drag the other along if one decided
    for both; the steps that count are the last half of 2,000.
    """
    measurements = told_of()
    policies = [AutoPolicy(measurements, Rule.GREEDY, 16) for _ in range(2)]
    good, bad = run_together(measurements, policies, [16, 0], 2000)
    assert sum(good[1000:]) > 900, sum(good[1000:])
    assert sum(bad[1000:]) < 150, sum(bad[1000:])


def test_a_request_that_asks_for_one_draft_token_asks_for_itself_only() -> None:
    """Claim: plans are adopted among requests of the same limit; one that allows one draft token leaves those beside it
    as they were."""
    measurements = told_of()
    policies = [AutoPolicy(measurements, Rule.GREEDY, cap) for cap in (1, 16)]
    run_together(measurements, policies, [16, 16], 400)
    lengths = [policy.plan(ROOM).draft_length_max for policy in policies]
    assert lengths[0] == 1 and lengths[1] > 2, lengths


def test_plain_rounds_among_speculating_sessions_tell_nothing_false_of_plain_decoding() -> None:
    """Claim: a session that looks at plain decoding while fifteen others offer draft tokens holds its rounds against a
    step of those rows. Held against a step of one row each they would seem 2.5 times too long, and plain decoding so
    much slower than it is."""
    measurements = told_of()
    for _ in range(40):
        measurements.on_target_step(16, 0.020, False, 16, 16)
    policy = AutoPolicy(measurements, Rule.GREEDY, 16)
    while not policy.is_speculating:
        measurements.on_target_step(76, 0.050, False, 16, 16)
        measurements.on_draft_step(16, 0.003)
        policy.on_round(0, 0, None, 0.051)
    assert measurements.plain_bias.count and 0.95 <= (measurements.plain_bias.value or 0.0) <= 1.05
    assert 0.95 <= (measurements.plain_rate or 0.0) * 0.021 <= 1.05


def test_load_shrinks_speculation_to_none() -> None:
    """Claim (docs/architecture.md): the more sessions share a step whose rows cost, the fewer draft tokens each offers,
    until none does; nobody is refused anything for it. Conclusive: the same text and draft, only the number differs; at
    32 a draft token that is right every other time doubles the step."""
    offered = []
    for count in (1, 4, 32):
        measurements = told_of()
        policies = [AutoPolicy(measurements, Rule.GREEDY, 16) for _ in range(count)]
        run_together(measurements, policies, [1] * count, 600, every=2)
        offered.append(sum(policy.plan(ROOM).draft_length_max for policy in policies) / count)
    assert offered[0] >= offered[1] > 0.5 > 2 * offered[2], offered


def test_a_draft_serves_all_that_are_at_work() -> None:
    """Claim: where sessions take turns in the target's steps, the draft still grows the trees of all of them, so its
    step is that of all their leaves: 8 of 16 in a step, and what 16 leaves take."""
    measurements = told_of()
    measurements.on_target_step(8, 0.02, True, 8, 16)
    for leaves, seconds in ((8, 0.002), (16, 0.005), (128, 0.030)):
        measurements.on_draft_step(leaves, seconds)
    conditions = AutoPolicy(measurements, Rule.GREEDY, 16).conditions()
    assert conditions is not None and conditions.draft_step_s(1) == 0.005
