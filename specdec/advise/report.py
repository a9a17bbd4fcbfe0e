"""What is told about a draft, or a head on the target: acceptance by class and temperature, plans with their rates, and
where drafting ends to pay. Plain values, for the table, the picture and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch

from specdec.advise.chains import CHAIN
from specdec.advise.forecast import (
    LENGTHS,
    Break,
    Estimate,
    Times,
    bootstrapped,
    break_even,
    calibration_error,
    calibration_sums,
    expected_draft_tokens,
    expected_rounds,
    lorenz_share,
    resampled,
    resampled_part,
    share,
)
from specdec.advise.measuring import Reading, by_prompt
from specdec.protocol.types import Rule

TOKENS_A_MILLION, SECONDS_AN_HOUR = 1e6, 3600.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One class of prompts at one temperature. `acceptance`: by rule, of a draft token whose predecessors passed;
    `places`: of a head, by rule, that of the first, second, ... token of a chain, those before it accepted, of chains
    behind every token; `tokens`: by rule, of a round with 1, 2, ... draft tokens; the others are means over positions
    (see `Agreement`), `variation_in_tenth` the share of the total variation distance in the tenth of the positions that
    have most, `cosine` None where hidden sizes differ."""

    prompt_class: str
    temperature: float
    positions: int
    acceptance: dict[str, Estimate]
    places: dict[str, list[Estimate]]
    tokens: dict[str, list[Estimate]]
    variation: Estimate
    variation_in_tenth: Estimate
    divergence: Estimate
    entropy: Estimate
    reachable: Estimate
    calibration_error: Estimate
    cosine: Estimate | None


@dataclass(frozen=True, slots=True)
class ChainForecast:
    """Rounds of `length` draft tokens that the coordinator waits for: tokens of a round, tokens per second of one
    stream, and its ratio to plain decoding. `acceptance`: accepted / verified draft tokens, those after a rejected one
    among them, as in the statistics of a generation. `accepted_per_draft_s`: accepted tokens per second of draft
    computation. `price`: of a million tokens; 0 without prices."""

    length: int
    tokens: Estimate
    acceptance: Estimate
    rate: Estimate
    ratio: Estimate
    accepted_per_draft_s: float
    price: float


@dataclass(frozen=True, slots=True)
class Advice:
    """One draft, or head: its step is a pass. `best`: its recommended number of draft tokens; 0: plain decoding."""

    draft: str
    weight_bytes: int
    target_step_s: float
    draft_step_s: float
    plain_rate: float
    plain_price: float
    best: int
    cells: list[Cell]
    plans: list[ChainForecast]
    pays_until: Break

    @property
    def is_head(self) -> bool:
        """Whether it is a head on the target."""
        return self.pays_until.rtt_s is None

    @property
    def best_plan(self) -> ChainForecast | None:
        """The recommended plan; None for plain decoding."""
        return next((plan for plan in self.plans if plan.length == self.best), None)

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON values."""
        return asdict(self)


def cells_of(readings: Sequence[Reading]) -> list[Cell]:
    """Returns the cells that have texts, by class and temperature; last, if there are several classes, all of them."""
    classes = list(dict.fromkeys(reading.text.prompt_class for reading in readings))
    temperatures = sorted({reading.text.params.temperature for reading in readings})
    cells = []
    for name in [*classes, *(["every class"] if len(classes) > 1 else [])]:
        for temperature in temperatures:
            own = [
                reading
                for reading in readings
                if reading.text.params.temperature == temperature
                and (name == reading.text.prompt_class or name not in classes)
            ]
            if own:
                cells.append(cell_of(name, temperature, own))
    return cells


def cell_of(name: str, temperature: float, readings: Sequence[Reading]) -> Cell:
    """Returns the measures of some texts together."""
    rules = list(readings[0].agreement.accepted)
    chained = [rule for rule in rules if any(rule in reading.agreement.deeper for reading in readings)]
    acceptance = {rule.name: resampled_part(sums_of(readings, rule)) for rule in rules}

    parts = [reading.agreement for reading in readings]

    def mean(attribute: str) -> Estimate:
        return resampled([[float(getattr(part, attribute).sum()), float(len(part))] for part in parts], share)

    variation = [part.variation.sort().values.tolist() for part in parts]  # sorted, all are sorted sooner
    calibration = [calibration_sums(part.confidence.tolist(), part.is_likeliest.tolist()) for part in parts]
    return Cell(
        name,
        temperature,
        sum(map(len, parts)),
        acceptance,
        {rule.name: [resampled_part(reached_of(readings, place, rule)) for place in range(CHAIN)] for rule in chained},
        {rule.name: [resampled(rounds_of(readings, length, rule), share) for length in LENGTHS] for rule in rules},
        mean("variation"),
        bootstrapped(variation, lambda chosen: lorenz_share(list(chain.from_iterable(chosen)))),
        mean("divergence"),
        mean("entropy"),
        mean("reachable"),
        resampled(calibration, calibration_error),
        None if any(part.cosine.isnan().any() for part in parts) else mean("cosine"),
    )


def sums_of(readings: Iterable[Reading], rule: Rule) -> list[list[float]]:
    """Returns, by text, accepted draft tokens and positions, if one is tested at each."""
    return [[float(reading.agreement.accepted[rule].sum()), float(len(reading.agreement))] for reading in readings]


def reached_of(readings: Iterable[Reading], place: int, rule: Rule) -> list[list[float]]:
    """Returns, by text, how many chains that begin at each of its positions are expected to have their token `place`,
    from 0, accepted, and how many to have those before it accepted."""
    sums = []
    for own in readings:
        coins = own.coins(rule)
        count = max(0, coins.shape[1] - place)
        reached = torch.ones(count, dtype=torch.float64)
        *before, last = (coins[min(at, len(coins) - 1)] for at in range(place + 1))
        for at, row in enumerate(before):
            reached = reached * row[at : at + count]
        sums.append([float((reached * last[place:]).sum()), float(reached.sum())])
    return sums


def rounds_of(readings: Iterable[Reading], length: int, rule: Rule | None = None) -> list[list[float]]:
    """Returns, by text, its tokens and the expected rounds that write them, under a rule, or the one that reproduces
    it; without the first, which comes with the prompt's last row."""
    sums = []
    for own in readings:
        first, *deeper = own.coins(rule).tolist()
        sums.append([float(len(first)), expected_rounds(first, length, deeper)])
    return sums


def accepted_of(readings: Iterable[Reading], length: int, rule: Rule | None = None) -> list[list[float]]:
    """Returns, by text, expected accepted and verified draft tokens of the same rounds."""
    sums = []
    for own in readings:
        [(tokens, rounds)] = rounds_of([own], length, rule)
        first, *deeper = own.coins(rule).tolist()
        sums.append([tokens - rounds, expected_draft_tokens(first, length, deeper)])
    return sums


def rounds_forecast(readings: Sequence[Reading], length: int, rule: Rule | None = None) -> tuple[Estimate, Estimate]:
    """Returns accepted / verified draft tokens, and tokens of a round, of rounds of `length` draft tokens: of the texts
    that have a rule, or of all, each under the rule that reproduces it."""
    own = [reading for reading in readings if rule is None or rule in reading.agreement.passes]
    texts = [reading.text for reading in own]
    acceptance = resampled_part(by_prompt(texts, accepted_of(own, length, rule)))
    return acceptance, resampled(by_prompt(texts, rounds_of(own, length, rule)), share)


def plans_of(readings: Sequence[Reading], times: Times, prices: tuple[float, float]) -> list[ChainForecast]:
    """Returns a plan for each number of draft tokens. `prices`: of an hour of the target's and the draft's machine, 0
    where there is none."""
    plans = []
    plain_s = times.round_s(0)
    for length in LENGTHS:
        acceptance, tokens = rounds_forecast(readings, length)
        rate = tokens.times(times.rate(1.0, length))
        accepted_a_draft_s = acceptance.value / times.draft(1)  # a step each; at a text's end rounds draft fewer
        price = price_of(sum(prices), rate.value)
        plans.append(ChainForecast(length, tokens, acceptance, rate, rate.times(plain_s), accepted_a_draft_s, price))
    return plans


def price_of(price_an_hour: float, rate: float) -> float:
    """The price of a million tokens."""
    return price_an_hour / SECONDS_AN_HOUR / rate * TOKENS_A_MILLION


def advice_of(
    draft: str, weight_bytes: int, readings: Sequence[Reading], times: Times, prices: tuple[float, float]
) -> Advice:
    """Returns the advice about one draft, or head."""
    plans = plans_of(readings, times, prices)
    plain_rate = 1 / times.round_s(0)
    fastest = max(plans, key=lambda plan: plan.rate.value)
    return Advice(
        draft,
        weight_bytes,
        times.target(1),
        times.draft(1),
        plain_rate,
        price_of(prices[0], plain_rate),
        fastest.length if fastest.rate.value > plain_rate else 0,
        cells_of(readings),
        plans,
        break_even([plan.tokens.value for plan in plans], times),
    )
