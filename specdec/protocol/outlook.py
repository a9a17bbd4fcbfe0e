"""A choice that one session made, as others take it over: the plan is theirs too, what it brings depends on the text.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec.policy.plan import Plan

ACCEPTANCE_MAX = 0.99  # of a formula that has a limit at 1


@dataclass(frozen=True, slots=True)
class Outlook:
    """What one session's choice came to: tokens per second of the plan by the model and its `gain` over plain decoding,
    both at the session's own `acceptance`, and the service's round it was made in."""

    plan: Plan
    tokens_per_s: float
    gain: float
    acceptance: float
    is_final: bool
    made_round: int

    def at(self, acceptance: float, offered_count: float) -> Outlook:
        """The same plan for a session of another acceptance: a round takes the same, and brings
        (1 - a^(m + 1)) / (1 - a) tokens where m are offered."""
        share = expected_tokens(acceptance, offered_count) / expected_tokens(self.acceptance, offered_count)
        return replace(self, tokens_per_s=share * self.tokens_per_s, gain=share * self.gain, acceptance=acceptance)


def expected_tokens(acceptance: float, offered_count: float) -> float:
    """1 + a + ... + a^m, also between whole numbers."""
    acceptance = min(acceptance, ACCEPTANCE_MAX)
    return (1 - acceptance ** (offered_count + 1)) / (1 - acceptance)
