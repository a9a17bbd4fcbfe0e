"""How long a target may leave verifications unanswered before their generations end; pure, no I/O.

A target whose step hangs ends itself, and a lost one is noticed by its link. This bound is for an answer that never
comes from a target that lives. It must not end what only waits its turn: prompts are computed in turns, a session that
was preempted waits for older ones. So two bounds hold, in seconds of `tick`, which counts the ticks of the event loop:
time in which this process was stopped is one tick.

1. The target answered no verification at all for QUIET_S, and FACTOR times as long as its answers took lately and as
   the prompts that it was sent take.
2. It answered others, but left this one for TURN_FACTOR times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.protocol.items import Verification, VerificationResult

OVERDUE = "overdue"  # the cause of such a loss, in a word
TICK_S = 1.0
QUIET_S = 60.0  # the first step of a shape may load or measure kernels for so long: see `engine.scheduling.heartbeat`
FACTOR = 8.0  # as for a step: other coordinators' prompts, and long contexts, are not in the measured times
TURN_FACTOR = 10.0  # ten minutes and more: a text that waits for longer is better resumed
FADING = 0.99  # of the time of late answers, with each answer


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A verification in flight: its incarnation and round, when the round was sent first, and the seconds that its
    prompt takes."""

    incarnation: int
    round_index: int
    sent_s: float
    prompt_s: float


class Deadlines:
    """The unanswered verifications of one target, by session. `token_s`: seconds per token of a prompt, at most."""

    def __init__(self) -> None:
        self.token_s = 0.0
        self._now_s = 0.0
        self._answered_s = 0.0
        self._usual_s = 0.0
        self._unanswered: dict[int, Unanswered] = {}

    def sent(self, item: Verification) -> None:
        """A verification is sent; sent again, it has the time of the first."""
        known, name = self._unanswered.get(item.session), (item.incarnation, item.round_index)
        if known is not None and known.round_index == item.round_index:
            self._unanswered[item.session] = Unanswered(*name, known.sent_s, known.prompt_s)
        else:
            prompt_s = 0.0 if item.round_index else item.base_position * self.token_s
            self._unanswered[item.session] = Unanswered(*name, self._now_s, prompt_s)

    def answered(self, item: VerificationResult) -> None:
        """An answer came; one of an older round or incarnation changes nothing."""
        known = self._unanswered.get(item.session)
        if known is not None and (known.incarnation, known.round_index) == (item.incarnation, item.round_index):
            del self._unanswered[item.session]
            self._answered_s = self._now_s
            self._usual_s = max(self._now_s - known.sent_s, FADING * self._usual_s)

    def heard(self) -> None:
        """A part of an answer came: the target is at work."""
        self._answered_s = self._now_s

    def forget(self, session: int) -> None:
        """The session has ended; idempotent."""
        self._unanswered.pop(session, None)

    def tick(self) -> dict[int, str]:
        """TICK_S have passed; returns the sessions whose verification is overdue, with the reason for users."""
        self._now_s += TICK_S
        if not self._unanswered:
            return {}
        prompts_s = sum(one.prompt_s for one in self._unanswered.values())
        quiet_s = QUIET_S + FACTOR * (self._usual_s + prompts_s)
        return {
            session: f"the target did not answer a verification for {self._now_s - one.sent_s:g} s"
            for session, one in self._unanswered.items()
            if self._now_s - max(one.sent_s, self._answered_s) > quiet_s
            or self._now_s - one.sent_s > TURN_FACTOR * quiet_s
        }
