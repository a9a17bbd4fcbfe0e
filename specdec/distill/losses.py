"""Losses of a student and its acceptance, from the target's likeliest tokens and the student's logits.

All are sums over the target's likeliest tokens and one entry for all others. With p the target's and q the student's
distribution at one position, the acceptance of a drawn token is sum min(p, q) = 1 - TV(p, q) (Leviathan et al. 2023,
equation 5); the divergence KL(p || q) bounds what is lost: TV <= sqrt(KL / 2) (Pinsker).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SMALL, LEAST = 1e-9, 1e-37


@dataclass(frozen=True, slots=True)
class Labels:
    """The target's distributions at some positions. `own_ids`: the student's ids of the target's likeliest tokens; -1
    for tokens it does not have."""

    own_ids: Tensor  # [n, k] int64
    log_probs: Tensor  # [n, k] float32, at temperature 1


def probabilities(labels: Labels, logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Returns p and q of the likeliest tokens and, last, of all others.  # [n, k + 1] float32 each

    `temperature` is at most 1: there the others, tempered as one token, have at least their share, so p of the
    likeliest is at most a little too small. logits: [n, student's vocabulary] float32
    """
    scaled = logits if temperature == 1 else logits / temperature
    is_known = labels.own_ids >= 0
    chosen = (scaled.gather(1, labels.own_ids.clamp_min(0)) - scaled.logsumexp(1, keepdim=True)).exp()
    chosen = torch.where(is_known, chosen, 0.0)
    others = (1 - chosen.sum(1, keepdim=True)).clamp_min(SMALL)
    return target_probabilities(labels, temperature), torch.cat([chosen, others], 1)


def target_probabilities(labels: Labels, temperature: float) -> Tensor:
    """Returns p: see `probabilities`.  # [n, k + 1] float32"""
    rest = (1 - labels.log_probs.exp().sum(1, keepdim=True)).clamp_min(SMALL)
    return (torch.cat([labels.log_probs, rest.log()], 1) / temperature).softmax(1)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) by position, without tokens the student cannot propose.  # [n]"""
    terms = p * (p.clamp_min(SMALL).log() - q.clamp_min(LEAST).log())  # of logs: worst misses keep their gradient
    return torch.where(q > 0, terms, 0.0).sum(1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """1 - sum min(p, q) by position: the probability that a drawn token is rejected.  # [n]"""
    return 1 - torch.minimum(p, q).sum(1)


def negative_log_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """-log sum min(p, q) by position: the loss of the chance that a chain of tokens survives.  # [n]"""
    return -torch.minimum(p, q).sum(1).clamp_min(SMALL).log()


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "tv": total_variation,
    "nla": negative_log_acceptance,
}


def greedy_acceptance(labels: Labels, logits: Tensor) -> Tensor:
    """Whether the student's likeliest token is the target's, by position.  # [n] float32"""
    return (logits.argmax(1) == labels.own_ids[:, 0]).float()


def certain_acceptance(labels: Labels, token_ids: Tensor, temperature: float) -> Tensor:
    """The target's probability of a token that is proposed with certainty, its acceptance under every rule, by
    position.  # [n] float32

    At temperature 0 whether it is the target's likeliest. token_ids: [n] int64.
    """
    is_same = labels.own_ids == token_ids[:, None]
    if temperature == 0:
        return is_same[:, 0].float()
    p = target_probabilities(labels, temperature)[:, :-1]
    return torch.where(is_same, p, 0.0).sum(1)


def rejection_acceptance(labels: Labels, logits: Tensor, temperature: float) -> Tensor:
    """sum min(p, q) over the likeliest tokens, by position: at least this is accepted.  # [n] float32"""
    p, q = probabilities(labels, logits, temperature)
    return torch.minimum(p, q)[:, :-1].sum(1)


def coupled_acceptance(labels: Labels, logits: Tensor, temperature: float) -> Tensor:
    """The probability that both choose one token with common Gumbel noise, by position.  # [n] float32

    Token x wins both races with probability 1 / sum_y max(p_y / p_x, q_y / q_x): both are races of exponential times
    with the same clock, and x must be first in each. Summed over the likeliest tokens x; of all others y the sum of
    both ratios stands for the larger ones. So it is at least this.
    """
    p, q = probabilities(labels, logits, temperature)
    own_p, own_q = p[:, :-1, None].clamp_min(SMALL), q[:, :-1, None].clamp_min(SMALL)
    against = torch.maximum(p[:, None, :-1] / own_p, q[:, None, :-1] / own_q).sum(2)
    against += (p[:, -1:, None] / own_p + q[:, -1:, None] / own_q).squeeze(2)
    return torch.where(q[:, :-1] > 0, 1 / against, 0.0).sum(1)
