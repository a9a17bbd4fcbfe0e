"""The target distribution again, from the formulas of docs/exactness.md: plain Python, token by token, no tensors.

A reference, not a fast one. It also returns the distance of a policy to its nearest limit: close to a limit two correct
computations may round to different sides, and a comparison means nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.protocol.types import ResolvedSamplingParams

Edited = list[float]


def edited_logits(params: ResolvedSamplingParams, logits: Sequence[float], path: Sequence[int]) -> Edited:
    """Logits after allowed_token_ids, bad_words, min_tokens, logit_bias, repetition, presence and frequency penalty."""
    output = list(path[params.prompt_length :])
    edited = [float(value) for value in logits]
    every = set(range(len(edited)))
    ends = {word[-1] for word in params.bad_words if output[max(0, len(output) - len(word) + 1) :] == list(word[:-1])}
    stops = set(params.stop_token_ids) if len(output) < params.min_tokens else set()
    for illegal in (every - set(params.allowed_token_ids or every), ends, stops):
        masked = [-math.inf if token in illegal else value for token, value in enumerate(edited)]
        edited = masked if max(masked) > -math.inf else edited
    for token, bias in params.logit_bias:
        if token < len(edited):
            edited[token] += bias
    for token, value in enumerate(edited):
        if token in path[params.encoder_length :]:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        count = output.count(token)
        edited[token] = value - params.presence_penalty * (count > 0) - params.frequency_penalty * count
    return edited


def sampled_distribution(
    params: ResolvedSamplingParams, logits: Sequence[float], path: Sequence[int]
) -> tuple[list[float], float]:
    """Probabilities, 0 outside the support, and the distance to the nearest limit of min_p or top_p."""
    edited = edited_logits(params, logits, path)
    largest = max(edited)
    weights = [math.exp((value - largest) / params.temperature) for value in edited]
    margin = math.inf
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if params.min_p > 0:
        margin = min(abs(weight - params.min_p) for weight in weights if weight != params.min_p or params.min_p < 1)
        order = [token for token in order if weights[token] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(weights[token] for token in order)
        kept, before = [], 0.0
        for token in order:
            margin = min(margin, abs(before / total - params.top_p))
            if before < params.top_p * total:
                kept.append(token)
            before += weights[token]
        order = kept
    total = math.fsum(weights[token] for token in order)
    return [weights[token] / total if token in order else 0.0 for token in range(len(edited))], margin
