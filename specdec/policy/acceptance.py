"""Acceptance: the probability that a draft token is accepted after those before it. Pure."""

from __future__ import annotations

import math

from specdec.policy.mean import Mean
from specdec.protocol.records import RoundRecord

ACCEPTANCE_GUESS = 0.65
TOKENS_KEPT, PRIOR_TOKENS = 400.0, 40.0  # tested tokens that count, and those as which the estimate above counts
UNTESTED_S = 60.0  # an acceptance that nothing tests returns to the one above it in about this time


class Acceptance:
    """Of a draft under one rule, and of a session, shrunk to that of its draft, `above`."""

    def __init__(self, above: Acceptance | None = None) -> None:
        self._above = above
        self._mean = Mean(self._prior, TOKENS_KEPT)

    @property
    def _prior(self) -> float:
        return ACCEPTANCE_GUESS if self._above is None else self._above.value

    @property
    def value(self) -> float:
        """The estimate."""
        return self._mean.shrunk(self._prior, PRIOR_TOKENS)

    @property
    def spread(self) -> float:
        """Its standard error."""
        value = self.value
        return math.sqrt(value * (1 - value) / (PRIOR_TOKENS + self._mean.weight))

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

    def fade(self, seconds: float) -> None:
        """Nothing tested it for so long."""
        self._mean.forget(math.exp(-seconds / UNTESTED_S))

    def forget(self) -> None:
        """Another draft: drops all samples."""
        self._mean.forget()


def expected_accepted(acceptance: float, length: float) -> float:
    """Returns a + a^2 + ... + a^length, also for a `length` that is not an integer (Leviathan et al. 2023)."""
    if acceptance > 1 - 1e-3:
        return length
    beyond: float = acceptance**length
    return acceptance * (1.0 - beyond) / (1.0 - acceptance)
