"""The expected tokens of a step under REJECTION, against the formulas of the papers in fractions."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest
import torch

from bench.proposers.expected import expected_tokens, passes
from specdec.protocol.calibration import Calibration
from specdec.protocol.offer import Offer
from specdec.protocol.types import DraftProbs, Proposer
from tests.exactness.siblings import tests_of as ratios_of

TARGET = (Fraction(1, 2), Fraction(1, 4), Fraction(1, 4), Fraction(0))
DRAFT = DraftProbs((0, 1, 2, 3), (1, 4, 2, 1))


@pytest.mark.parametrize("tokens", [(1,), (1, 0), (1, 3, 0), (3, 1, 2), (0, 1, 2, 3)])
def test_siblings_pass_as_often_as_the_formulas_say(tokens: tuple[int, ...]) -> None:
    """Claim: the chance of each sibling, given that those before it were refused, is that of recursive rejection
    sampling. Source: Chen et al. 2024, in fractions (tests/exactness)."""
    target = torch.tensor([float(share) for share in TARGET], dtype=torch.float64)
    ratios, _ = ratios_of(TARGET, tokens, (DRAFT,) * len(tokens))
    found = list(passes(target, tokens, (DRAFT,) * len(tokens)))
    sure = next((index for index, ratio in enumerate(ratios) if ratio == 1), len(tokens))
    assert found[: sure + 1] == pytest.approx([float(ratio) for ratio in ratios[: sure + 1]])


def test_a_tree_is_worth_its_reachable_tokens() -> None:
    """Claim: a step has one token more than are accepted; below a refused token nothing counts, and a sibling counts
    where the first was refused: 1 + a + (1 - a) s + a b for a first token of chance a with a token of chance b below
    it, and a sibling of chance s."""
    targets = torch.tensor([[float(share) for share in TARGET]] * 3, dtype=torch.float64)
    a, s = passes(targets[0], (1, 0), (DRAFT,) * 2)
    (b,) = passes(targets[0], (2,), (DRAFT,))
    guess = ((Proposer.DRAFT, "any"),)
    offer = Offer((1, 2, 0), (0, 1, 0), (DRAFT,) * 3, (guess,) * 3)
    found = expected_tokens(offer, targets, Calibration(), random.Random(1))
    assert 0 < a < 1 and 0 < b <= 1 and found == pytest.approx(1 + a + (1 - a) * s + a * b)
