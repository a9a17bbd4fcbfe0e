"""Chi-square tests with a limit fixed beforehand. Keys are fixed in the tests: a result never changes by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scipy.stats import chi2
from torch import Tensor

P_VALUE_LIMIT = 1e-6  # about one false alarm in a million fixed choices of keys; a real flaw gives far less


def chi_square_p(counts: Sequence[float] | Tensor, probabilities: Sequence[float] | Tensor) -> float:
    """The p-value of observed counts against a distribution; tokens of probability 0 must not occur at all."""
    observed = torch.as_tensor(counts, dtype=torch.float64).flatten()
    expected = torch.as_tensor(probabilities, dtype=torch.float64).flatten() * observed.sum()
    assert float(observed[expected == 0].sum()) == 0, "something impossible happened"
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert float(expected.min()) >= 5, "too few samples for a chi-square test"
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float(chi2.sf(float(statistic), len(observed) - 1))


def uniformity_p(values: Tensor, cell_count: int) -> float:
    """The p-value that integers in [0, cell_count) are uniform."""
    return chi_square_p(torch.bincount(values.flatten(), minlength=cell_count), [1 / cell_count] * cell_count)
