"""The share of intervals that hold on new prompts, for prompts of a known distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean

import pytest

from bench import coverage
from bench.coverage import ADVISE, BENCHMARK, division
from bench.results import Results
from specdec.advise.forecast import Estimate, resampled_part
from specdec.errors import ConfigError


def cell(prompts: int, seed: int) -> list[list[float]]:
    """Prompts of 50 positions, each with an acceptance of its own between 0.3 and 0.7."""
    draws = random.Random(seed)
    return [[50 * draws.uniform(0.3, 0.7), 50.0] for _ in range(prompts)]


def halved(prompts: Sequence[Sequence[float]]) -> Estimate:
    """A stub: an interval of half the width."""
    told = resampled_part(prompts)
    return Estimate(told.value, (told.low + told.value) / 2, (told.high + told.value) / 2)


def measured(cells: Sequence[Sequence[Sequence[float]]], stated: int, turns: int) -> Results:
    """The divisions of each cell, all of one draft."""
    results = Results({})
    for place, prompts in enumerate(cells):
        for turn in range(turns):
            results.add({"draft": "draft", "temperature": place}, ADVISE, division(prompts, stated, turn))
    return results


def reached(results: Results) -> list[float]:
    """The share that is covered, and half the width of the widest cell's interval."""
    return [bar.reached or 0.0 for bar in BENCHMARK.bars(results)]


def test_the_share_is_that_of_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: intervals of 40 equally distributed prompts hold on 360 others about as often as stated, and those of half
    the width far less often: the share can tell a bad interval from a good one. By the normal distribution 0.95 of the
    first, with the others' own error 0.937, and 0.67 of the second."""
    cells = [cell(400, seed) for seed in range(10)]
    good = measured(cells, 40, 10)
    monkeypatch.setattr(coverage, "resampled_part", halved)
    bad = measured(cells, 40, 10)
    covered, widest = reached(good)
    assert 0.88 <= covered <= 1 and reached(bad)[0] < 0.85
    widths = [fmean(samples[ADVISE]["half_width"]) for _, samples in good.found]
    assert 0.02 < fmean(widths) <= widest == max(widths) < 0.06  # 1.96 x 0.115 / sqrt(40) = 0.036
    assert [bar.state for bar in BENCHMARK.bars(good)] == ["met", "met"]
    assert BENCHMARK.bars(bad)[0].state == "missed"


def test_equal_prompts_are_always_covered() -> None:
    """Claim: where every prompt says the same the interval holds; its width is that of the one more prompt, of mean one
    half and standard deviation 0.29, whose share falls with the number of prompts."""
    few, many = (reached(measured([[[3.0, 6.0]] * 99], stated, 5)) for stated in (4, 90))
    assert few[0] == many[0] == 1 and 0.1 < few[1] < 0.3 and 0 < many[1] < 0.02


@pytest.mark.parametrize("stated", [1, 9])
def test_prompts_are_needed_on_both_sides(stated: int) -> None:
    """Claim: a number that leaves no interval or no new prompt is refused."""
    with pytest.raises(ConfigError, match="there are 9 prompts"):
        division([[3.0, 6.0]] * 9, stated, 0)
