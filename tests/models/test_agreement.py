"""The measure of agreement: right on distributions whose answer is known, and ordered as theory says."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.models.agreement import Share, Text, bound, equal_share, overlap, params_at, rejection_share
from specdec.protocol.types import DraftProbs

VOCABULARY = 50


def random_text(generator: torch.Generator, token_count: int = 40) -> Text:
    """A text whose logits are random and whose tokens are their argmax."""
    logits = torch.randn(token_count, VOCABULARY, generator=generator) * 2
    return Text((1, 2, 3), tuple(logits.argmax(dim=1).tolist()), logits)


def test_overlap_by_hand() -> None:
    """Claim: sum min(target, draft), computed by hand: min(.5, .25) + min(.2, .75) = .45."""
    assert overlap(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), DraftProbs((0, 2), (1, 3))) == pytest.approx(
        0.45
    )


def test_a_draft_equal_to_the_target_is_always_taken() -> None:
    """Claim: with the target's own logits as the draft's every measure is 1, up to the tokens DraftProbs leaves out."""
    text = random_text(torch.Generator().manual_seed(0))
    greedy, sampled = params_at(0, 0, 3), params_at(0.7, 0, 3)
    assert equal_share(text, text.logits, greedy) == 1
    assert bound(text, text.logits, sampled) == pytest.approx(1)
    assert 0.9 < rejection_share(text, text.logits, sampled) <= 1


def test_a_draft_of_other_tokens_is_never_taken() -> None:
    """Claim: disjoint supports overlap nowhere; conclusive because one position shared would show."""
    text = random_text(torch.Generator().manual_seed(0))
    low, high = text.logits.clone(), text.logits.clone()
    low[:, VOCABULARY // 2 :], high[:, : VOCABULARY // 2] = -1e4, -1e4
    target = Text(text.prompt, tuple(low.argmax(dim=1).tolist()), low)
    assert equal_share(target, high, params_at(0, 0, 3)) == 0
    assert rejection_share(target, high, params_at(1, 0, 3)) == 0 == bound(target, high, params_at(1, 0, 3))


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_no_rule_exceeds_the_bound(temperature: float) -> None:
    """Claim: REJECTION's share is at most the overlap of the whole distributions (DraftProbs are truncated).

    With fewer tokens in the vocabulary than in DraftProbs the two are equal up to the weights' 16 bits.
    """
    generator = torch.Generator().manual_seed(1)
    text, other = random_text(generator), torch.randn(40, VOCABULARY, generator=generator) * 2
    params = params_at(temperature, 0, 3)
    assert abs(rejection_share(text, other, params) - bound(text, other, params)) < 0.05
    few = Text(text.prompt, tuple(text.logits[:, :20].argmax(dim=1).tolist()), text.logits[:, :20])
    assert rejection_share(few, other[:, :20], params) == pytest.approx(bound(few, other[:, :20], params), abs=1e-3)


def test_share_counts_prompts() -> None:
    """Claim: the standard error is that of the mean over prompts."""
    assert Share.over([0.4, 0.6]) == Share(0.5, pytest.approx(math.sqrt(0.02) / math.sqrt(2)))
    assert Share.over([0.4]).error == 0
