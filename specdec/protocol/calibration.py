"""Probabilities learned from outcomes: what a guess with certain features was worth in the past.

Sharply trained drafts are overconfident, and a match of four tokens is worth more in code than in prose. So guesses are
counted by their features, and a prior stands for outcomes not seen yet. The results order and limit what is drafted and
verified; they cannot change the target distribution (docs/exactness.md). Pure.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Hashable

from specdec.protocol.limits import CONFIDENCE_MAX
from specdec.protocol.types import CONFIDENCE_EDGES, Rule

PRIOR_COUNT = 8.0  # weight of the prior, in outcomes
COUNT_MAX = 2048.0  # a fuller count is halved, so that it follows a changing text
PROBABILITY_MIN, PROBABILITY_MAX = 0.001, 0.999
RANK_COUNT = 4  # the proposal child and three branch children


class Calibration:
    """Shares of guesses that came true, by the guesses' features.

    `shared`: of a service, from which one session's prior comes; what a session records goes to both.
    """

    def __init__(self, shared: Calibration | None = None, count_max: float = COUNT_MAX) -> None:
        self._shared = shared
        self._count_max = count_max
        self._counts: dict[Hashable, list[float]] = {}  # [came true, counted]

    def probability(self, features: Hashable, prior: float) -> float:
        """Returns P(the guess comes true | the path before it does): the share, shrunk towards the prior."""
        if self._shared is not None:
            prior = self._shared.probability(features, prior)
        counts = self._counts.get(features)
        share = prior if counts is None else (counts[0] + PRIOR_COUNT * prior) / (counts[1] + PRIOR_COUNT)
        if share < PROBABILITY_MIN:
            return PROBABILITY_MIN
        return share if share < PROBABILITY_MAX else PROBABILITY_MAX

    def record(self, features: Hashable, came_true: bool) -> None:
        """Counts one guess whose parent's path was committed, once."""
        if self._shared is not None:
            self._shared.record(features, came_true)
        counts = self._counts.setdefault(features, [0.0, 0.0])
        counts[0] += came_true
        counts[1] += 1
        if counts[1] > self._count_max:
            counts[0] /= 2
            counts[1] /= 2


def confidence_bin(confidence: float) -> int:
    """Returns the bin of a confidence, from 1 to CONFIDENCE_MAX."""
    return 1 + bisect.bisect_right(CONFIDENCE_EDGES, confidence)


def confidence_features(rule: Rule, rank: int, confidence: float) -> Hashable:
    """Returns the features of a guess of a draft model: its rule, its rank among its siblings, its confidence."""
    return bin_features(rule)[min(rank, RANK_COUNT - 1)][confidence_bin(confidence)]


@functools.cache
def bin_features(rule: Rule) -> list[list[Hashable]]:
    """Returns the features of the guesses of a rule, by rank and by bin of the confidence."""
    return [[(rule.value, rank, own) for own in range(CONFIDENCE_MAX + 1)] for rank in range(RANK_COUNT)]
