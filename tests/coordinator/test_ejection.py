"""Health of replicas and the retry budget, second by second: what ejects, for how long, and what never happens."""

from __future__ import annotations

from specdec.coordinator.ejection import (
    EJECTION_MAX_S,
    EJECTION_S,
    FAULT_COUNT,
    FORGIVEN_S,
    REPLICAS_PER_REQUEST,
    RETRIES_PER_S,
    RETRY_SHARE,
    ROUND_COUNT,
    ROUNDS_KEPT_S,
    SLOW_FACTOR,
    WINDOW_S,
    Health,
    PoolHealth,
    RetryBudget,
)


def pool_of(count: int) -> tuple[PoolHealth, list[Health]]:
    """A pool of this number of replicas."""
    pool = PoolHealth()
    return pool, [pool.add() for _ in range(count)]


def faults(health: Health, now_s: float, count: int = FAULT_COUNT) -> bool:
    """Faults in a row; whether the last ejects."""
    return [health.fault(now_s) for _ in range(count)][-1]


def rounds(health: Health, round_s: float, now_s: float, count: int = ROUND_COUNT, session_count: int = 4) -> bool:
    """Answered rounds; whether the last ejects."""
    return [health.answered(round_s, session_count, now_s) for _ in range(count)][-1]


def test_three_faults_in_a_row_eject_and_an_answer_between_does_not() -> None:
    """Claim: the third fault without an answered round between ejects for EJECTION_S, to the second; an answer starts
    the count anew."""
    _, (one, _) = pool_of(2)
    for _ in range(10):
        assert not faults(one, 0, FAULT_COUNT - 1)
        one.answered(0.02, 1, 0)
    assert not one.is_ejected(0)
    assert faults(one, 5) and one.is_ejected(5) and one.is_ejected(5 + EJECTION_S - 1)
    assert not one.is_ejected(5 + EJECTION_S)


def test_ejections_last_longer_each_time_up_to_a_bound_and_are_forgiven() -> None:
    """Claim: the n-th ejection lasts n times EJECTION_S, EJECTION_MAX_S at most; faults within one do not prolong it;
    after FORGIVEN_S without one the next is the first again."""
    _, (one, _) = pool_of(2)
    now_s, lengths = 0.0, []
    for _ in range(12):
        assert faults(one, now_s)
        end_s = one.ejected_until_s
        assert not faults(one, now_s + 1) and one.ejected_until_s == end_s
        lengths.append(end_s - now_s)
        now_s = end_s
        one.answered(0.02, 1, now_s)
    assert lengths == [min(EJECTION_S * count, EJECTION_MAX_S) for count in range(1, 13)]
    assert lengths[-1] == EJECTION_MAX_S
    now_s += FORGIVEN_S + 1
    assert faults(one, now_s) and one.ejected_until_s == now_s + EJECTION_S


def test_a_replica_much_slower_than_the_others_is_ejected() -> None:
    """Claim: a median of ROUND_COUNT rounds above SLOW_FACTOR times the others' median ejects, also in a pool of two;
    at the factor, after fewer, or by a few long pauses it does not; nor where the others were not measured
    within ROUNDS_KEPT_S.

    Conclusive: the same rounds are given with each condition on either side of its bound.
    """
    _, (slow, other) = pool_of(2)
    assert not rounds(slow, 10.0, 0)  # nothing to compare with
    rounds(other, 0.02, 0)
    assert not rounds(slow, SLOW_FACTOR * 0.02, 1)
    assert not rounds(slow, 0.02, 1, ROUND_COUNT // 2 + 1)
    assert not rounds(slow, 100.0, 1, ROUND_COUNT // 2 - 1)
    assert not rounds(slow, 0.07, ROUNDS_KEPT_S + 1)
    rounds(other, 0.02, ROUNDS_KEPT_S + 1)
    assert not rounds(slow, 0.07, ROUNDS_KEPT_S + 2, ROUND_COUNT - 1)
    assert rounds(slow, 0.07, ROUNDS_KEPT_S + 2, 1) and slow.is_ejected(ROUNDS_KEPT_S + 2)
    assert not rounds(other, 0.02, ROUNDS_KEPT_S + 2)


def test_a_busy_replica_is_no_slow_one() -> None:
    """Claim: rounds are compared with those of others that had as many sessions, by its bits. Conclusive: the same
    times eject once another replica was as fast with as many."""
    _, (busy, idle, other) = pool_of(3)
    rounds(idle, 0.005, 0, session_count=1)
    rounds(other, 0.005, 0, session_count=1)
    assert not rounds(busy, 0.05, 1, session_count=8)
    rounds(idle, 0.01, 1, session_count=15)
    assert rounds(busy, 0.05, 2, session_count=8)


def test_never_more_than_half_of_a_pool_is_ejected() -> None:
    """Claim: whatever fails, half of the pool at most is ejected, and none of one replica; one that fails while half is
    gets its turn with its next fault after an ejection ended; where replicas leave, those whose time ends first are
    used again.

    Conclusive: all replicas fail, in pools of one to nine; then the pool shrinks to three.
    """
    for count in range(1, 10):
        _, members = pool_of(count)
        for member in members:
            faults(member, 0)
        assert sum(member.is_ejected(0) for member in members) == count // 2
    pool, members = pool_of(4)
    for at_s, member in enumerate(members):
        faults(member, at_s)
    assert [member.is_ejected(4) for member in members] == [True, True, False, False]
    assert not members[2].fault(EJECTION_S - 1) and members[2].fault(EJECTION_S)
    assert [member.is_ejected(EJECTION_S) for member in members] == [False, True, True, False]
    pool.remove(members[3])
    assert [member.is_ejected(EJECTION_S) for member in members[:3]] == [False, False, True]


def test_retries_are_a_share_of_the_openings_and_a_few_a_second() -> None:
    """Claim: within WINDOW_S at most RETRY_SHARE of the openings and RETRIES_PER_S a second are granted; what was
    opened and retried longer ago does not count; one text is tried at REPLICAS_PER_REQUEST replicas at most.

    Conclusive: retries are requested until the first is refused, and counted, at a window's start, end and later.
    """

    def granted(budget: RetryBudget, now_s: float) -> int:
        return next(count for count in range(10_000) if not budget.retry(1, now_s))

    budget, now_s = RetryBudget(), 1_000_000.7
    for _ in range(1000):
        budget.opened(now_s)
    allowed = RETRY_SHARE * 1000 + RETRIES_PER_S * WINDOW_S
    assert granted(budget, now_s) == allowed
    assert granted(budget, now_s + WINDOW_S - 1) == 0
    assert granted(budget, now_s + WINDOW_S) == RETRIES_PER_S * WINDOW_S
    assert granted(budget, now_s + 10 * WINDOW_S) == RETRIES_PER_S * WINDOW_S
    fresh = RetryBudget()
    assert [fresh.retry(count, 0) for count in range(1, REPLICAS_PER_REQUEST + 2)] == [
        count < REPLICAS_PER_REQUEST for count in range(1, REPLICAS_PER_REQUEST + 2)
    ]
