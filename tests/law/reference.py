"""The sampled law once more, from the formulas of docs/exactness.md: plain Python, one token at a time, no tensors.

Written to be compared with, not to be fast. It also says how near a policy comes to one of its own limits: there,
two correct computations may round to different sides, and comparing them says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.protocol.types import Law

Edited = list[float]


def edited_logits(law: Law, logits: Sequence[float], path: Sequence[int]) -> Edited:
    """min_tokens mask, logit_bias, repetition penalty, presence and frequency penalty."""
    output = list(path[law.prompt_length :])
    edited = [float(value) for value in logits]
    if len(output) < law.min_tokens:
        masked = [-math.inf if token in law.stop_token_ids else value for token, value in enumerate(edited)]
        edited = masked if max(masked) > -math.inf else edited
    for token, bias in law.logit_bias:
        if token < len(edited):
            edited[token] += bias
    for token, value in enumerate(edited):
        if token in path:
            value = value / law.repetition_penalty if value > 0 else value * law.repetition_penalty
        count = output.count(token)
        edited[token] = value - law.presence_penalty * (count > 0) - law.frequency_penalty * count
    return edited


def sampled_law(law: Law, logits: Sequence[float], path: Sequence[int]) -> tuple[list[float], float]:
    """Probabilities, 0 outside the support, and the distance to the nearest limit of min_p or top_p."""
    edited = edited_logits(law, logits, path)
    largest = max(edited)
    weights = [math.exp((value - largest) / law.temperature) for value in edited]
    margin = math.inf
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if law.min_p > 0:
        margin = min(abs(weight - law.min_p) for weight in weights if weight != law.min_p or law.min_p < 1)
        order = [token for token in order if weights[token] >= law.min_p]
    if law.top_k > 0:
        order = order[: law.top_k]
    if law.top_p < 1:
        total = math.fsum(weights[token] for token in order)
        kept, before = [], 0.0
        for token in order:
            margin = min(margin, abs(before / total - law.top_p))
            if before < law.top_p * total:
                kept.append(token)
            before += weights[token]
        order = kept
    total = math.fsum(weights[token] for token in order)
    return [weights[token] / total if token in order else 0.0 for token in range(len(edited))], margin
