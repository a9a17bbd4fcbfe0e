"""The measure of agreement: right on distributions whose answer is known, and ordered as theory says."""

from __future__ import annotations

import math

import pytest
import torch

from models.agreement import Share, Text, bound, equal_share, law_at, overlap, rejection_share
from specdec.protocol.types import Row

VOCABULARY = 50


def random_text(generator: torch.Generator, token_count: int = 40) -> Text:
    """A text whose logits are random and whose tokens are their argmax."""
    logits = torch.randn(token_count, VOCABULARY, generator=generator) * 2
    return Text((1, 2, 3), tuple(logits.argmax(dim=1).tolist()), logits)


def test_overlap_of_a_row_by_hand() -> None:
    """Claim: sum min(target, row), worked out by hand: min(.5, .25) + min(.2, .75) = .45."""
    assert overlap(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), Row((0, 2), (1, 3))) == pytest.approx(0.45)


def test_a_draft_equal_to_the_target_is_always_taken() -> None:
    """Claim: with the target's own logits as the draft's, every measure is 1, but for what a row leaves out."""
    text = random_text(torch.Generator().manual_seed(0))
    greedy, sampled = law_at(0, 0, 3), law_at(0.7, 0, 3)
    assert equal_share(text, text.logits, greedy) == 1
    assert bound(text, text.logits, sampled) == pytest.approx(1)
    assert 0.9 < rejection_share(text, text.logits, sampled) <= 1


def test_a_draft_of_other_tokens_is_never_taken() -> None:
    """Claim: disjoint supports overlap nowhere; conclusive because one position shared would show."""
    text = random_text(torch.Generator().manual_seed(0))
    low, high = text.logits.clone(), text.logits.clone()
    low[:, VOCABULARY // 2 :], high[:, : VOCABULARY // 2] = -1e4, -1e4
    target = Text(text.prompt, tuple(low.argmax(dim=1).tolist()), low)
    assert equal_share(target, high, law_at(0, 0, 3)) == 0
    assert rejection_share(target, high, law_at(1, 0, 3)) == 0 == bound(target, high, law_at(1, 0, 3))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_no_rule_exceeds_the_bound(temperature: float) -> None:
    """Claim: REJECTION's share is at most the overlap of the whole distributions (its row is another draft law).

    With fewer tokens in the vocabulary than in a row the two are equal up to the weights' 16 bits.
    """
    generator = torch.Generator().manual_seed(1)
    text, other = random_text(generator), torch.randn(40, VOCABULARY, generator=generator) * 2
    law = law_at(temperature, 0, 3)
    assert abs(rejection_share(text, other, law) - bound(text, other, law)) < 0.05
    few = Text(text.prompt, tuple(text.logits[:, :20].argmax(dim=1).tolist()), text.logits[:, :20])
    assert rejection_share(few, other[:, :20], law) == pytest.approx(bound(few, other[:, :20], law), abs=1e-3)


def test_share_counts_prompts() -> None:
    """Claim: the standard error is that of the mean over prompts."""
    assert Share.over([0.4, 0.6]) == Share(0.5, pytest.approx(math.sqrt(0.02) / math.sqrt(2)))
    assert Share.over([0.4]).error == 0
