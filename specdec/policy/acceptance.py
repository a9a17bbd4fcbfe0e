"""Acceptance: the probability that a draft token is accepted after those before it. Pure."""

from __future__ import annotations

import math

from specdec.policy.mean import Mean
from specdec.protocol.records import RoundRecord

ACCEPTANCE_GUESS, PRIOR_TOKENS = 0.65, 40.0  # of a draft; tested tokens as which the estimate above counts
HEAD_GUESS, HEAD_PRIOR_TOKENS = 0.5, 6.0  # of a feature head, of which the first tokens tell whether it was trained


class Acceptance:
    """Of a draft under one rule, and of a session, shrunk to that of its draft, `above`."""

    def __init__(
        self, above: Acceptance | None = None, guess: float = ACCEPTANCE_GUESS, guess_tokens: float = PRIOR_TOKENS
    ) -> None:
        """`guess`: where nothing is above, of as many tested tokens as `guess_tokens`."""
        self._above, self._guess, self._prior_tokens = above, guess, guess_tokens
        self._mean = Mean(guess)

    @classmethod
    def of_head(cls) -> Acceptance:
        """That of a feature head."""
        return cls(None, HEAD_GUESS, HEAD_PRIOR_TOKENS)

    @property
    def value(self) -> float:
        """The estimate."""
        return self._mean.shrunk(self._guess if self._above is None else self._above.value, self._prior_tokens)

    @property
    def spread(self) -> float:
        """Its standard error."""
        return math.sqrt(self.value * (1 - self.value) / (self._prior_tokens + self._mean.weight))

    def add(self, record: RoundRecord) -> None:
        """Takes a round: the draft model's tokens up to the first rejection were tested. Where none was: whether its
        tree had the committed one, else a draft that is always wrong would keep the acceptance of its first rounds."""
        tested, accepted = record.tokens.model_tested_count, record.tokens.model_accepted_count
        if not tested and record.plan.window and record.tree.was_looked_up:
            tested, accepted = 1, int(record.tree.was_found)
        if tested:
            self._mean.add(accepted / tested, tested)
            if self._above is not None:
                self._above._mean.add(accepted / tested, tested)

    def forget(self, kept_share: float = 0.0) -> None:
        """Scales the weight of all that was tested: nothing tests it, or the draft is another."""
        self._mean.forget(kept_share)


def expected_accepted(acceptance: float, length: float) -> float:
    """Returns a + a^2 + ... + a^length, also for a `length` that is not an integer (Leviathan et al. 2023)."""
    beyond: float = acceptance**length
    return acceptance * (1.0 - beyond) / (1.0 - acceptance) if acceptance < 1 - 1e-3 else length
