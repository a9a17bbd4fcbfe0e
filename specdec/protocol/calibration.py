"""From a draft's confidence in a token to the probability that the token is committed, learned from what happened.

A model's own probabilities are not those of another model's tokens: a draft trained to sharpness is sure too often.
Confidences are sorted into bins, one set for each rule and rank, and each bin counts how often its tokens came true.
What is learned orders the draft's work and nothing else, so it cannot change a law (docs/exactness.md).
"""

from __future__ import annotations

import bisect

from specdec.protocol.types import Rule

EDGES = (0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
RANK_COUNT = 4  # the proposal child and three branch children
PRIOR_COUNT = 8.0  # outcomes the confidence itself is worth: after so many in a bin both count alike
COUNT_MAX = 2048.0  # a fuller bin is halved, so that a changing text is followed
PROBABILITY_MIN, PROBABILITY_MAX = 0.001, 0.999


class Calibration:
    """One draft model's record: `probability` is asked for every guess, `record` told of those on a committed path."""

    def __init__(self) -> None:
        bin_count = (1 + max(rule.value for rule in Rule)) * RANK_COUNT
        self._bins = [[[0.0, 0.0] for _ in range(len(EDGES) + 1)] for _ in range(bin_count)]

    def probability(self, rule: Rule, rank: int, confidence: float) -> float:
        """P(committed | the path before it is) of a guess: the bin's share, shrunk towards the confidence."""
        came_true, count = self._bin(rule, rank, confidence)
        share = (came_true + PRIOR_COUNT * confidence) / (count + PRIOR_COUNT)
        return min(max(share, PROBABILITY_MIN), PROBABILITY_MAX)

    def record(self, rule: Rule, rank: int, confidence: float, came_true: bool) -> None:
        """Counts one guess whose place was reached by the committed tokens, once."""
        counts = self._bin(rule, rank, confidence)
        counts[0] += came_true
        counts[1] += 1
        if counts[1] > COUNT_MAX:
            counts[0] /= 2
            counts[1] /= 2

    def _bin(self, rule: Rule, rank: int, confidence: float) -> list[float]:
        """[came true, counted] of the bin a confidence falls in."""
        bins = self._bins[rule.value * RANK_COUNT + min(rank, RANK_COUNT - 1)]
        return bins[bisect.bisect_right(EDGES, confidence)]
