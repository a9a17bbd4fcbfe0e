"""The most draft tokens of a session with a FIXED plan under the present load. Pure.

A draft token costs its row in every session's step and brings a token if it is accepted. Alone, a session gets the plan
it asked for. Beside others it gets the draft length with the most tokens per second if all sessions had that length:
(1 + expected accepted tokens) over T(rows of all sessions) and the rest of its round; 0 is plain decoding.
"""

from __future__ import annotations

from specdec.policy.catalogue import expected_accepted
from specdec.policy.steps import Fading, StepCurve
from specdec.protocol.records import RoundRecord

REVIEW_ROUNDS = 4
SHRINK_GAIN = 1.1  # least ratio of worths for a plan shorter than asked: the estimates are rough
SESSIONS_ALONE = 1.5  # mean of active sessions below which a session is alone
WEIGHT = 0.2  # of the newest round in a session's means


class Acceptance:
    """The share of tested draft tokens that were accepted, over about the last 1 / (1 - kept) rounds."""

    def __init__(self, guess: float, guess_tokens: float, kept: float) -> None:
        self._guess, self._guess_tokens, self._kept = guess, guess_tokens, kept
        self._accepted = self._tested = 0.0

    def add(self, record: RoundRecord) -> None:
        """Adds one round: the tokens up to the first rejection were tested."""
        self._accepted = self._kept * self._accepted + record.tokens.accepted_count
        self._tested = self._kept * self._tested + record.tokens.tested_count

    @property
    def share(self) -> float:
        """The share; without tests the guess."""
        return (self._guess * self._guess_tokens + self._accepted) / (self._guess_tokens + self._tested)


class Load:
    """What all sessions with FIXED plans of a service measure: T(rows) and the acceptance of draft tokens."""

    def __init__(self) -> None:
        self.steps, self.fading = StepCurve(), Fading()
        self.acceptance = Acceptance(0.65, guess_tokens=20, kept=0.998)


class DraftLimit:
    """One session's limit; `session_count`: of the generations that run when it begins, itself included."""

    def __init__(self, load: Load, asked: int, session_count: int) -> None:
        self._load, self._asked = load, asked
        self._acceptance = Acceptance(load.acceptance.share, guess_tokens=20, kept=0.98)
        self._reach = float(asked)  # draft tokens in hand under the plan asked for
        self._beside_s = 0.0
        self.sessions = float(session_count)
        self.length = self._best()

    def on_round(self, record: RoundRecord) -> None:
        """Takes one round of the session; may change `length`."""
        if record.step.step_count > 1 or not record.round_index:  # it read a prompt or a preempted session
            return
        self._load.steps.add(record.step.rows, record.step.step_s)
        if self._load.fading.is_due(record.times.end_s):
            self._load.steps.fade()
        for acceptance in (self._acceptance, self._load.acceptance):
            acceptance.add(record)
        self.sessions += WEIGHT * (max(1, record.step.sessions, record.step.active_sessions) - self.sessions)
        beside_s = max(0.0, record.times.round_s - record.step.queue_s - record.step.step_s)
        self._beside_s += (WEIGHT if self._beside_s else 1.0) * (beside_s - self._beside_s)
        if record.plan.draft_length_max == self._asked:
            self._reach += WEIGHT * (record.tokens.offered_count - self._reach)
        if record.round_index % REVIEW_ROUNDS == 0:
            self.length = self._best()

    def _best(self) -> int:
        """Returns the length with the highest worth; the one asked for alone, or unless another gains SHRINK_GAIN."""
        if self.sessions < SESSIONS_ALONE:
            return self._asked
        worths = [self._worth(length) for length in range(self._asked + 1)]
        best = max(worths)
        return worths.index(best) if best > SHRINK_GAIN * worths[-1] else self._asked

    def _worth(self, length: int) -> float:
        """Tokens per second of a session if every session had plans of `length` draft tokens."""
        offered = min(length, self._reach)
        step_s = self._load.steps.seconds(self.sessions * (1 + offered)) or 1.0
        return (1 + expected_accepted(self._acceptance.share, offered)) / (step_s + self._beside_s)
