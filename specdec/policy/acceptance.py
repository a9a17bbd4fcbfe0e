"""Acceptance: the probability that a draft token is accepted after those before it. Pure."""

from __future__ import annotations

import math

from specdec.policy.mean import Mean
from specdec.protocol.records import RoundRecord

ACCEPTANCE_GUESS, PRIOR_TOKENS = 0.65, 40.0  # of a draft; tested tokens as which the estimate above counts


class Acceptance:
    """Of a draft under one rule, and of a session, shrunk to that of its draft, `above`."""

    def __init__(self, above: Acceptance | None = None) -> None:
        self._above = above
        self._mean = Mean(ACCEPTANCE_GUESS)

    @property
    def value(self) -> float:
        """The estimate."""
        return self._mean.shrunk(ACCEPTANCE_GUESS if self._above is None else self._above.value, PRIOR_TOKENS)

    @property
    def spread(self) -> float:
        """Its standard error."""
        return math.sqrt(self.value * (1 - self.value) / (PRIOR_TOKENS + self._mean.weight))

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
