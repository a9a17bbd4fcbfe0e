"""Acceptance and losses of a student against plain sums over whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.distill.losses import (
    Labels,
    coupled_acceptance,
    forward_kl,
    greedy_acceptance,
    negative_log_acceptance,
    probabilities,
    rejection_acceptance,
    total_variation,
)

VOCABULARY_SIZE, POSITIONS = 6, 40
TEMPERATURES = (0.7, 1.0)


def pair(likeliest_count: int = VOCABULARY_SIZE) -> tuple[torch.Tensor, torch.Tensor, Labels]:
    """Target logits, student logits, and labels of the target's likeliest tokens.  # [positions, vocabulary] each"""
    generator = torch.Generator().manual_seed(1)
    target, student = (2 * torch.randn(POSITIONS, VOCABULARY_SIZE, generator=generator) for _ in range(2))
    values, ids = target.topk(likeliest_count, dim=1)
    return target, student, Labels(ids, values - target.logsumexp(1, keepdim=True))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_rejection_acceptance_is_the_overlap(temperature: float):
    """Claim: with labels of the whole vocabulary it is sum min(p, q) of the distributions at the temperature (Leviathan
    et al. 2023, equation 5), and total variation is what it lacks of 1."""
    target, student, labels = pair()
    p, q = ((logits / temperature).softmax(1) for logits in (target, student))
    expected = torch.minimum(p, q).sum(1)
    assert torch.allclose(rejection_acceptance(labels, student, temperature), expected, atol=1e-5)
    own = probabilities(labels, student, temperature)
    assert torch.allclose(total_variation(*own), 1 - expected, atol=1e-5)
    assert torch.allclose(negative_log_acceptance(*own), -expected.log(), atol=1e-4)
    assert torch.allclose(forward_kl(*own), (p * (p / q).log()).sum(1), atol=1e-4)


def test_coupled_acceptance_of_two_tokens_is_exact():
    """Claim: of two tokens, both races choose token 0 with probability min(p, q), and token 1 likewise: the ratio of
    two exponential times is below t with probability t / (1 + t), and the smaller threshold decides. So acceptance is
    1 - |p - q|. Conclusive: derived without the formula of the code."""
    p, q = torch.rand(50), torch.rand(50)
    target, student = torch.stack([p, 1 - p], 1).log(), torch.stack([q, 1 - q], 1).log()
    values, ids = target.topk(2, dim=1)
    found = coupled_acceptance(Labels(ids, values), student, 1.0)
    assert torch.allclose(found, 1 - (p - q).abs(), atol=1e-4)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_coupled_acceptance_lies_between_its_bounds(temperature: float):
    """Claim: no coupling accepts more than sum min(p, q); this one at least half the share: 1 - TV over 1 + TV (Daliri
    et al. 2025, on Gumbel coupling). Equal distributions are always accepted."""
    target, student, labels = pair()
    found, most = (rule(labels, student, temperature) for rule in (coupled_acceptance, rejection_acceptance))
    assert bool((found <= most + 1e-5).all())
    assert bool((found >= most / (2 - most) - 1e-4).all())
    assert torch.allclose(coupled_acceptance(labels, target, temperature), torch.ones(POSITIONS), atol=1e-4)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_fewer_labels_never_say_too_much(temperature: float):
    """Claim: with the three likeliest tokens of six, each acceptance at temperature 1 is at most that of whole labels;
    under REJECTION it lacks at most the others' share."""
    _, student, labels = pair()
    *_, few = pair(3)
    if temperature == 1:
        missing = 1 - few.log_probs.exp().sum(1)
        for rule in (rejection_acceptance, coupled_acceptance):
            assert bool((rule(few, student, 1.0) <= rule(labels, student, 1.0) + 1e-5).all())
        lacking = rejection_acceptance(labels, student, 1.0) - rejection_acceptance(few, student, 1.0)
        assert bool((lacking <= missing + 1e-5).all())
    assert torch.equal(greedy_acceptance(few, student), greedy_acceptance(labels, student))


def test_coupled_acceptance_is_a_lower_bound():
    """Claim: of p = (1/2, 1/2, 0) and q = (1/2, 0, 1/2) with one label, token 0 is chosen by both with probability 1/3:
    one of three equal clocks. The others, seen as one, would say 1/2."""
    labels = Labels(torch.tensor([[0]]), torch.tensor([[0.5]]).log())
    logits = torch.tensor([[0.5, 1e-12, 0.5]]).log()
    assert float(coupled_acceptance(labels, logits, 1.0)) == pytest.approx(1 / 3, abs=1e-4)


def test_a_token_the_student_lacks_counts_as_rejected():
    """Claim: the target's likeliest token, unknown to the student, is accepted under no rule; the others are, as if the
    student had no more of them than its own distribution says."""
    _, student, labels = pair()
    unknown = Labels(torch.where(torch.arange(VOCABULARY_SIZE) == 0, -1, labels.own_ids), labels.log_probs)
    assert greedy_acceptance(unknown, student).sum() == 0
    p, q = probabilities(labels, student, 1.0)
    expected = torch.minimum(p, q)[:, 1:-1].sum(1)
    assert torch.allclose(rejection_acceptance(unknown, student, 1.0), expected, atol=1e-6)
    assert math.isfinite(float(forward_kl(*probabilities(unknown, student, 1.0)).sum()))
