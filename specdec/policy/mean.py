"""A mean that forgets. Pure."""

from __future__ import annotations

KEPT = 400.0  # samples that count
RECENT, SIGMA = 10.0, 3.5  # the last samples, and the deviation of their sum that is no chance, in standard deviations


class Mean:
    """The mean of about the last `kept` samples. Where the last RECENT ones deviate from it beyond chance, something
    jumped, and it starts anew with them."""

    __slots__ = ("value", "weight", "_kept", "_variance", "_deviation")

    def __init__(self, value: float, kept: float = KEPT, weight: float = 0.0) -> None:
        self.value, self.weight = value, weight
        self._kept, self._variance, self._deviation = kept, 0.0, 0.0

    def add(self, sample: float, count: float = 1.0) -> None:
        """Adds a sample that is the mean of `count` ones."""
        self.weight = min(self.weight + count, self._kept)
        deviation = sample - self.value
        self.value += deviation * min(1.0, count / self.weight)
        self._variance += (count * deviation**2 - self._variance) * count / (min(self.weight, 5 * RECENT) + count)
        if self.weight > 2 * RECENT:
            self._deviation += count * deviation - self._deviation * min(1.0, count / RECENT)
            if self._deviation**2 > SIGMA**2 * self._variance * RECENT / 2:
                self.value += self._deviation / RECENT
                self.weight, self._deviation = RECENT, 0.0

    def shrunk(self, prior: float, prior_weight: float) -> float:
        """The mean, with a prior that weighs as much as `prior_weight` samples."""
        return (prior_weight * prior + self.weight * self.value) / (prior_weight + self.weight)

    def forget(self, kept_share: float = 0.0) -> None:
        """Scales the weight of all samples."""
        self.weight *= kept_share
