"""From samples to measurements: medians, ratios of pairs with intervals, the best synchronous variant, predictions.

Pure: samples in, numbers out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.pipeline.samples import Sample
from bench.results import Ratio, ratio_of


@dataclass(frozen=True, slots=True)
class Measurements:
    """One variant in one cell. Rates and times are medians over generations; counts are totals put into ratios."""

    variant: str
    sample_count: int
    tokens_per_s: float
    acceptance: float
    mean_length: float
    hit_rate: float
    nodes_per_token: float
    draft_bytes_per_token: float
    forward_ms: float
    sampling_ms: float
    link_ms: float
    wait_ms: float
    rows: float
    predicted_tokens_per_s: float
    rounds_off: float


def measurements_of(samples: Sequence[Sample]) -> Measurements:
    """Of one variant's samples, at least one."""

    def median(name: str) -> float:
        values: list[float] = [getattr(sample, name) for sample in samples]
        return statistics.median(values)

    def total(name: str) -> float:
        return math.fsum(getattr(sample, name) for sample in samples)

    tokens = total("output_tokens")
    predicted = [sample.predicted_tokens_per_s for sample in samples if sample.predicted_tokens_per_s > 0]
    return Measurements(
        variant=samples[0].variant,
        sample_count=len(samples),
        tokens_per_s=median("tokens_per_s"),
        acceptance=total("accepted_tokens") / max(1.0, total("draft_tokens")),
        mean_length=1 + total("accepted_tokens") / max(1.0, total("spec_steps")),
        hit_rate=total("hits") / max(1.0, total("lookups")),
        nodes_per_token=total("evaluated_nodes") / tokens,
        draft_bytes_per_token=total("draft_bytes") / tokens,
        forward_ms=median("forward_ms"),
        sampling_ms=median("sampling_ms"),
        link_ms=median("link_ms"),
        wait_ms=median("wait_ms"),
        rows=1 + total("draft_tokens") / total("rounds"),
        predicted_tokens_per_s=statistics.median(predicted) if predicted else 0.0,
        rounds_off=total("rounds_off") / total("rounds"),
    )


def by_variant(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    """Samples by variant, in the order variants first appear."""
    grouped: dict[str, list[Sample]] = {}
    for sample in samples:
        grouped.setdefault(sample.variant, []).append(sample)
    return grouped


def gains_by_prompt(samples: Sequence[Sample], over: Sequence[Sample]) -> list[float]:
    """Tokens/s over tokens/s of every prompt; one measured several times counts once, by its median."""

    def rates(of: Sequence[Sample], prompt_id: int) -> float:
        return statistics.median(sample.tokens_per_s for sample in of if sample.prompt_id == prompt_id)

    prompt_ids = {sample.prompt_id for sample in samples}
    return [rates(samples, prompt_id) / rates(over, prompt_id) for prompt_id in prompt_ids]


def paired_gain(samples: Sequence[Sample], over: Sequence[Sample]) -> float:
    """Median over prompts of tokens/s over tokens/s."""
    return statistics.median(gains_by_prompt(samples, over))


def over_best_other(samples: Mapping[str, Sequence[Sample]], name: str) -> Ratio | None:
    """One variant's tokens/s over those of the best other: chosen on one half of the prompts, compared on the other,
    and the other way round, since the fastest in hindsight is so by luck too. None with fewer than two prompts.

    All variants were given the same prompts.
    """
    prompt_ids = sorted({sample.prompt_id for sample in samples[name]})
    others = [variant for variant in samples if variant != name]
    if len(prompt_ids) < 2 or not others:
        return None

    def gains(variant: str, over: str, among: Sequence[int]) -> list[float]:
        halves = [[sample for sample in samples[own] if sample.prompt_id in among] for own in (variant, over)]
        return gains_by_prompt(*halves)

    ratios: list[float] = []
    halves = prompt_ids[::2], prompt_ids[1::2]
    for chosen_on, compared_on in (halves, halves[::-1]):
        best = max(others, key=lambda other: statistics.median(gains(other, name, chosen_on)))
        ratios += gains(name, best, compared_on)
    return ratio_of(ratios)


def hazards(samples: Sequence[Sample], length_max: int) -> tuple[float, ...]:
    """Acceptance by place in the round, from rounds that offered `length_max` tokens; places never reached left out.

    The share of rounds that accepted more than i among those that accepted at least i.
    """
    counts = [0] * (length_max + 1)
    for sample in samples:
        for accepted, rounds in enumerate(sample.acceptance_histogram[: length_max + 1]):
            counts[accepted] += rounds
    reached = [sum(counts[place:]) for place in range(length_max + 1)]
    return tuple(reached[i + 1] / reached[i] for i in range(length_max) if reached[i])
