"""The sweep: cells of round trip and rule, variants interleaved prompt by prompt within each.

Off and auto are measured in pairs, one right after the other on one prompt, in turns; the others take part in the
first of the pairs. A cell where auto seems slower than off is measured again with more pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from bench.pipeline.measurements import Measurements, by_variant, measurements_of, over_best_other, paired_gain
from bench.pipeline.placement import Placed
from bench.pipeline.samples import Sample, measure
from bench.pipeline.variants import AUTO, OFF, Variant, is_reproducible
from bench.results import Ratio, ratio_of

RATIO_SUSPECT = 0.98
Advance = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: pairs of off and auto, of them with all variants, and the pairs a suspect cell is measured
    again with, fresh ones."""

    pair_count: int
    full_count: int
    pair_count_max: int
    warm_up_count: int
    max_tokens: int


@dataclass(slots=True)
class Cell:
    """One rule at one round trip. `ratio` is auto / off; `first_ratio` is set where the cell was measured again."""

    rule: str
    rtt_ms: float
    target_rtt_ms: float
    measured_rtt_ms: dict[str, float]
    samples: list[Sample] = field(default_factory=list)
    ratio: Ratio | None = None
    first_ratio: Ratio | None = None
    differing_prompts: tuple[int, ...] = ()
    cpu_shares: dict[str, float] = field(default_factory=dict)

    @property
    def comparable(self) -> dict[str, list[Sample]]:
        """Samples by variant, of the prompts all variants were given: texts differ in how well they are guessed."""
        grouped = by_variant(self.samples)
        common = set.intersection(*({sample.prompt_id for sample in own} for own in grouped.values()))
        return {name: [sample for sample in own if sample.prompt_id in common] for name, own in grouped.items()}

    @property
    def measurements(self) -> dict[str, Measurements]:
        """By variant, over the same prompts."""
        return {name: measurements_of(own) for name, own in self.comparable.items()}

    def gain(self, variant: str, over: str) -> float:
        """Median over prompts of one variant's tokens/s over another's on the same prompt."""
        return paired_gain(self.comparable[variant], self.comparable[over])

    @property
    def over_best_fixed(self) -> Ratio | None:
        """Auto over the best of the others, chosen on other prompts; None where there is too little to say so."""
        grouped = self.comparable
        return over_best_other(grouped, AUTO.name) if AUTO.name in grouped and len(grouped) > 2 else None

    def best_synchronous(self) -> str | None:
        """The fastest fixed draft length in hindsight, the strongest baseline there is; None where there is none."""
        names = [name for name in self.comparable if name.startswith("sync")]
        return max(names, key=lambda name: self.gain(name, OFF.name), default=None)


class Sweep:
    """Measures cells on running services."""

    def __init__(
        self, place: Placed, variants: Sequence[Variant], prompts: dict[int, str], effort: Effort, advance: Advance
    ) -> None:
        """`advance(weight)` is called after every generation; see `weight`."""
        self._place = place
        self._others = [variant for variant in variants if variant not in (OFF, AUTO)]
        self._has_auto = AUTO in variants
        self._prompts = list(prompts.items())
        self._effort = effort
        self._advance = advance

    def cell(self, rule: str, rtt_ms: float, target_rtt_ms: float) -> Cell:
        """Measures one cell, twice where auto seems slower than off."""
        self._place.set_rtt(rtt_ms, target_rtt_ms)
        cell = Cell(rule, rtt_ms, target_rtt_ms, self._place.measured_rtt_ms())
        for number in range(self._effort.warm_up_count):
            for variant in (AUTO, *self._others[:1]) if self._has_auto else self._others[:1]:
                self._measure(cell, variant, -1 - number)
        shares = self._place.begin_shares()
        ratios = list(self._pairs(cell, range(self._effort.pair_count), self._effort.full_count))
        if ratios:
            cell.ratio = ratio_of(ratios)
            if cell.ratio.median < RATIO_SUSPECT and self._effort.pair_count_max:
                cell.first_ratio = cell.ratio
                numbers = range(self._effort.pair_count, self._effort.pair_count + self._effort.pair_count_max)
                cell.ratio = ratio_of(list(self._pairs(cell, numbers, 0)))
        cell.differing_prompts = differing_prompts(cell)
        cell.cpu_shares = shares.so_far()
        return cell

    def _pairs(self, cell: Cell, numbers: range, full_count: int) -> Iterator[float]:
        """auto / off of each pair; the others are measured beside the first `full_count`."""
        for number in numbers:
            pair = [OFF, AUTO] if self._has_auto else [OFF]
            rates = {}
            for variant in pair if number % 2 else reversed(pair):
                rates[variant.name] = self._keep(cell, variant, number).tokens_per_s
            if number < full_count:
                shift = number % max(1, len(self._others))
                for variant in (*self._others[shift:], *self._others[:shift]):
                    self._keep(cell, variant, number)
            if self._has_auto:
                yield rates[AUTO.name] / rates[OFF.name]

    def _keep(self, cell: Cell, variant: Variant, number: int) -> Sample:
        cell.samples.append(self._measure(cell, variant, number))
        return cell.samples[-1]

    def _measure(self, cell: Cell, variant: Variant, number: int) -> Sample:
        prompt = self._prompts[number % len(self._prompts)]
        sample = measure(self._place.stub_of(variant), variant, cell.rule, cell.rtt_ms, prompt, self._effort.max_tokens)
        self._advance(weight(variant, cell.rtt_ms))
        return sample

    def weights(self, rtts_ms: Sequence[float], rule_count: int) -> float:
        """The weight of all measurements, without repeated ones."""
        pair = (OFF, AUTO) if self._has_auto else (OFF,)
        warm_up = [*pair[1:], *self._others[:1]] * self._effort.warm_up_count
        own = [*pair] * self._effort.pair_count + self._others * self._effort.full_count + warm_up
        return rule_count * sum(weight(variant, rtt_ms) for rtt_ms in rtts_ms for variant in own)


def weight(variant: Variant, rtt_ms: float) -> float:
    """About how long a generation takes beside one without speculation, for the estimate of the time left."""
    return 0.7 + rtt_ms / 40 if variant.is_synchronous else 1.0


def differing_prompts(cell: Cell) -> tuple[int, ...]:
    """Prompts whose text differed between variants where it must not: a defect."""
    if not is_reproducible(cell.rule):
        return ()
    digests: dict[int, set[str]] = {}
    for sample in cell.samples:
        digests.setdefault(sample.prompt_id, set()).add(sample.text_digest)
    return tuple(prompt_id for prompt_id, found in digests.items() if len(found) > 1)


def cells(
    sweep: Sweep, rtts_ms: Sequence[float], rules: Sequence[str], target_rtt_ms: float, made: Callable[[Cell], None]
) -> list[Cell]:
    """Measures all cells in turn; `made` is called with each at once, so that an interrupted run loses little."""
    result = []
    for rtt_ms, rule in product(rtts_ms, rules):
        result.append(sweep.cell(rule, rtt_ms, target_rtt_ms))
        made(result[-1])
    return result
