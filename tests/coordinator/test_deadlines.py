"""The bounds of unanswered verifications, in ticks: what trips them and what must not."""

from __future__ import annotations

from specdec.coordinator.deadlines import FACTOR, QUIET_S, TURN_FACTOR, Deadlines
from specdec.protocol.items import Verification, VerificationResult
from specdec.protocol.types import SamplerOutput

PROMPT_LENGTH = 2000


def ask(session: int, round_index: int = 0, incarnation: int = 1) -> Verification:
    """A verification after a long prompt."""
    return Verification(session, incarnation, round_index, PROMPT_LENGTH, (1,))


def answer(session: int, round_index: int = 0, incarnation: int = 1) -> VerificationResult:
    """Its answer."""
    return VerificationResult(session, incarnation, round_index, SamplerOutput((1,)))


def seconds_until_overdue(deadlines: Deadlines, session: int, seconds_max: float, other: int | None = None) -> int:
    """The ticks until a session is overdue, at most `seconds_max`; `other`: a session that is answered every second."""
    for second in range(int(seconds_max)):
        if other is not None:
            deadlines.sent(ask(other, second + 1))
            deadlines.answered(answer(other, second + 1))
        if session in deadlines.tick():
            return second + 1
    return 0


def test_a_quiet_target_is_given_its_prompts_time() -> None:
    """Claim: without any answer the bound is QUIET_S and FACTOR times the time of all prompts sent; sending the same
    round again does not prolong it.

    Source: a short prompt waited 68 s behind 40 prompts of 1,990 tokens. Conclusive: the bound of these is compared
    with what they take.
    """
    deadlines = Deadlines()
    deadlines.token_s = 68 / (40 * 1990)
    deadlines.sent(ask(0, round_index=1))
    assert seconds_until_overdue(deadlines, 0, 1000) == QUIET_S + 1
    deadlines.forget(0)
    for session in range(40):
        deadlines.sent(ask(session))
    half = seconds_until_overdue(deadlines, 0, 300)
    deadlines.sent(ask(0))
    rest = seconds_until_overdue(deadlines, 0, 1000)
    assert half == 0 and 300 + rest > FACTOR * 68 and 300 + rest < QUIET_S + FACTOR * 70


def test_a_late_answer_of_an_older_incarnation_ends_no_wait() -> None:
    """Claim: a round that was sent again under another incarnation stays unanswered when the answer to the first one
    comes late; the answer to the second ends the wait.

    Source: simulation, seed 1453: the late answer is dropped by its incarnation, and where the target never answered
    the second one the text waited for ever. Conclusive: the two answers differ by their incarnation only.
    """
    deadlines = Deadlines()
    deadlines.sent(ask(1, 1))
    deadlines.sent(ask(1, 1, incarnation=2))
    deadlines.answered(answer(1, 1))
    assert seconds_until_overdue(deadlines, 1, 1000) == QUIET_S + 1
    deadlines.forget(1)
    deadlines.sent(ask(1, 1, incarnation=2))
    deadlines.answered(answer(1, 1, incarnation=2))
    assert not seconds_until_overdue(deadlines, 1, 1000)


def test_a_session_that_waits_for_others_has_longer_but_not_for_ever() -> None:
    """Claim: while others are answered, a verification may wait TURN_FACTOR times as long, and then is overdue; what
    answers took lately prolongs the bound, and is forgotten.

    Conclusive: the same session is overdue at the first bound when no session is answered; both times are counted.
    """
    deadlines = Deadlines()
    deadlines.sent(ask(1, 1))
    assert seconds_until_overdue(deadlines, 1, 10_000, other=2) == TURN_FACTOR * QUIET_S + 1
    slow = Deadlines()
    slow.sent(ask(1, 1))
    assert not seconds_until_overdue(slow, 1, 50)
    slow.answered(answer(1, 1))
    slow.sent(ask(1, 2))
    assert seconds_until_overdue(slow, 1, 10_000) == QUIET_S + FACTOR * 50 + 1
    slow.forget(1)
    assert not seconds_until_overdue(slow, 1, 1000, other=2)
    slow.sent(ask(1, 3))
    assert seconds_until_overdue(slow, 1, 1000) == QUIET_S + 1
