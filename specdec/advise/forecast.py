"""From acceptance and step times to tokens per second of chains that wait for their draft. Pure.

A round verifies k draft tokens and yields E of them: it takes T(k + 1) + k d + r(k) seconds, of the target's step, the
draft's steps or the passes of a head on the target, and the rest. Trees and streaming, which the policy also tries, are
not predicted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from statistics import NormalDist
from typing import TypeVar

LENGTHS = tuple(range(1, 9))  # draft tokens of a round
BATCHES = (1, 2, 4, 8, 16, 32, 64)
RESAMPLES = 1000
INTERVAL = 0.95
BINS = 10  # of confidence

Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    def times(self, factor: float) -> Estimate:
        """Returns it in another unit."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def expected_rounds(passes: Sequence[float], length: int, deeper: Sequence[Sequence[float]] = ()) -> float:
    """The expected number of rounds that write a text, by the probabilities that its positions pass.

    A round at position t with `length` draft tokens moves on by one more than passed. No round drafts beyond the text.
    `deeper`: the same of a position that is the second of its round, the third, ...; the last of all tells of later
    ones too.
    """
    return _expected((passes, *deeper), length, lambda drafted: 1)


def expected_draft_tokens(passes: Sequence[float], length: int, deeper: Sequence[Sequence[float]] = ()) -> float:
    """The expected number of draft tokens that these rounds verify: all that are sent, tested or not."""
    return _expected((passes, *deeper), length, lambda drafted: drafted)


def _expected(by_place: Sequence[Sequence[float]], length: int, of_round: Callable[[int], int]) -> float:
    """The expected sum over rounds of a function of their draft tokens."""
    passes, places = by_place[0], len(by_place)
    sums: list[float] = [0] * (len(passes) + 1)
    for start in reversed(range(len(passes))):
        left: float = 1
        end = start + min(length, len(passes) - start - 1)
        value: float = of_round(end - start)  # integers, so that fractions stay exact
        for position in range(start, end):
            passed = by_place[min(position - start, places - 1)][position]
            value += left * (1 - passed) * sums[position + 1]
            left *= passed
        sums[start] = value + left * sums[end + 1]
    return sums[0]


def bootstrapped(
    groups: Sequence[Group],
    of: Callable[[Sequence[Group]], float],
    other: Callable[[random.Random], Group] | None = None,
) -> Estimate:
    """The value of all groups, and its interval by bootstrap over the groups, which are prompts: neighbouring tokens,
    and texts of one prompt, are dependent. A share `tail_of` the number of groups of the resamples lies beyond each
    end. `other`: draws a group that stands for prompts like none of these; resamples have it as often as any."""
    draws = random.Random(1)
    places = range(len(groups) + (other is not None))

    def resample() -> list[Group]:
        chosen = draws.choices(places, k=len(places))
        return [groups[place] if place < len(groups) or other is None else other(draws) for place in chosen]

    found = sorted(of(resample()) for _ in range(RESAMPLES))
    beyond = int(RESAMPLES * tail_of(len(groups)))
    return Estimate(of(groups), found[beyond], found[-1 - beyond])


def resampled(groups: Sequence[Sequence[float]], of: Callable[[Sequence[float]], float]) -> Estimate:
    """The same for a value of the sums of all groups' numbers."""
    return bootstrapped(groups, lambda chosen: of([sum(column) for column in zip(*chosen)]))


def resampled_part(groups: Sequence[Sequence[float]]) -> Estimate:
    """The first sum over the second where the first is a part of the second, such as accepted draft tokens, with its
    interval. Resamples of the prompts at hand say nothing of others that are like none of them, such as the few on
    which a poor draft is right: one more prompt, of mean size, stands for these, its part drawn anew each time, all
    parts equally likely (Ferguson 1973; Muliere and Secchi 1996, a bootstrap with a prior)."""
    mean = sum(whole for _, whole in groups) / len(groups)

    def part(chosen: Sequence[Sequence[float]]) -> float:
        return share([sum(column) for column in zip(*chosen)])

    return bootstrapped(groups, part, lambda draws: (mean * draws.random(), mean))


def tail_of(count: int) -> float:
    """The share of resamples beyond each end of an interval. A bootstrap of few prompts varies less than new ones do:
    the ends lie where Student's distribution and n / (n - 1) put them (expanded percentiles, Hesterberg 2015)."""
    free = max(1, count - 1)
    z = NormalDist().inv_cdf((1 + INTERVAL) / 2)
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)  # Cornish, Fisher
    return NormalDist().cdf(-student * math.sqrt(count / free))


def share(sums: Sequence[float]) -> float:
    """The first sum over the second."""
    return sums[0] / sums[1] if sums[1] else 0.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds: `target` by rows, `draft` by nodes of all sessions, the round trip `rtt` to the draft, and the `rest` of
    a round by its draft tokens. `rtt` is None for a head, whose passes lie in the target's step."""

    target: Callable[[float], float]
    draft: Callable[[float], float]
    rtt: float | None
    rest: Callable[[float], float]

    def round_s(self, length: int, batch: int = 1) -> float:
        """A round of `batch` sessions with `length` draft tokens each; without any there is no draft to wait for."""
        waited_s = length * self.draft(batch) + (self.rtt or 0.0) if length else 0.0
        return self.target(batch * (length + 1)) + waited_s + self.rest(length)

    def rate(self, tokens: float, length: int, batch: int = 1) -> float:
        """Tokens per second of one session."""
        return tokens / self.round_s(length, batch)


def line_through(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Returns the function that is linear between points, ascending by their first value, and constant beyond them."""

    def value(at: float) -> float:
        after = next((index for index, (x, _) in enumerate(points) if x >= at), len(points) - 1)
        (x0, y0), (x1, y1) = points[max(0, after - 1)], points[after]
        return y1 if x1 <= x0 or at >= x1 else y0 + (y1 - y0) * (max(at, x0) - x0) / (x1 - x0)

    return value


@dataclass(frozen=True, slots=True)
class Break:
    """Where drafting no longer pays: by round trip (None for a head, which has none), by the draft's step, by sessions
    in a batch (the largest of BATCHES up to which it pays at each; 0: not for one session). Negative or 0: it does not
    pay at any."""

    rtt_s: float | None
    draft_step_s: float
    batch: int


def break_even(tokens: Sequence[float], times: Times) -> Break:
    """`tokens`: of a round with 1, 2, ... draft tokens."""
    plain_s = times.round_s(0)
    slack = {length: mean * plain_s - times.round_s(length) for length, mean in enumerate(tokens, 1)}
    step_s = times.draft(1)

    def pays(batch: int) -> bool:
        plain_rate = 1 / times.round_s(0, batch)
        return any(times.rate(mean, length, batch) > plain_rate for length, mean in enumerate(tokens, 1))

    return Break(
        None if times.rtt is None else times.rtt + max(slack.values()),
        max(step_s + slack[length] / length for length in slack),
        max(takewhile(pays, BATCHES), default=0),
    )


def calibration_sums(confidences: Sequence[float], outcomes: Sequence[float]) -> list[float]:
    """Returns the number of positions, and for each of BINS of confidence the sum of confidence - outcome."""
    sums = [float(len(confidences)), *[0.0] * BINS]
    for confidence, outcome in zip(confidences, outcomes):
        sums[1 + min(int(confidence * BINS), BINS - 1)] += confidence - outcome
    return sums


def calibration_error(sums: Sequence[float]) -> float:
    """The expected calibration error: the mean over BINS of |confidence - share that came true|, by positions. `sums`:
    of `calibration_sums`, of all texts."""
    return sum(map(abs, sums[1:])) / max(1.0, sums[0])


def lorenz_share(values: Sequence[float], part: float = 0.1) -> float:
    """The share of the sum that lies in the `part` of the values that are largest."""
    largest = sorted(values, reverse=True)[: max(1, math.ceil(part * len(values)))]
    return sum(largest) / sum(values) if sum(values) else 0.0
