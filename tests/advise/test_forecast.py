"""The method of `specdec advise`, against enumeration, and its formulas, against cases with a known answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache

import pytest

from specdec.advise.forecast import (
    Estimate,
    Times,
    break_even,
    calibration_error,
    calibration_sums,
    expected_draft_tokens,
    expected_rounds,
    line_through,
    lorenz_share,
    resampled,
    resampled_part,
    share,
    tail_of,
)
from specdec.advise.serving import Served
from specdec.step_curve import StepCurve

VOCABULARY = range(3)
TEXT_LENGTH = 5
Probs = tuple[Fraction, ...]


def probs(name: str, path: tuple[int, ...]) -> Probs:
    """A distribution after a path, of either model: rational, different at every path, with a zero now and then."""
    salt = sum((token + 2) * (3 + place) for place, token in enumerate(path)) + (7 if name == "draft" else 0)
    weights = [(salt * (token + 1) + token) % 5 for token in VOCABULARY]
    weights[salt % 3] += 1
    return tuple(Fraction(weight, sum(weights)) for weight in weights)


def rounds_by_enumeration(length: int, of_round: Callable[[int], int] = lambda drafted: 1) -> Fraction:
    """The expected rounds of speculative decoding that write TEXT_LENGTH tokens, or the sum of a function of their
    draft tokens: all draws of the draft, all coins, all recovered and bonus tokens, as the algorithm of Leviathan et
    al. 2023 has them."""

    @cache
    def rounds(path: tuple[int, ...]) -> Fraction:
        if len(path) == TEXT_LENGTH:
            return Fraction(0)
        drafted = min(length, TEXT_LENGTH - len(path) - 1)
        return of_round(drafted) + tested(path, drafted)

    @cache
    def tested(path: tuple[int, ...], left: int) -> Fraction:
        """Expected rounds after this one, of which `left` draft tokens are still to be tested."""
        p, q = probs("target", path), probs("draft", path)
        if left == 0:
            return sum((p[x] * rounds((*path, x)) for x in VOCABULARY), Fraction(0))
        value, rejected = Fraction(0), Fraction(0)
        for x in VOCABULARY:
            passes = min(Fraction(1), p[x] / q[x]) if q[x] else Fraction(0)
            value += q[x] * passes * (tested((*path, x), left - 1) if q[x] * passes else 0)
            rejected += q[x] * (1 - passes)
        residual = [max(p[x] - q[x], Fraction(0)) for x in VOCABULARY]
        for x in VOCABULARY:
            if residual[x]:
                value += rejected * residual[x] / sum(residual) * rounds((*path, x))
        return value

    return rounds(())


def mean_over_texts(expected: Callable[[Sequence[float], int], float], length: int) -> Fraction:
    """The mean of a forecast over the target's texts, each with its probability."""
    total = Fraction(0)
    for text in itertools.product(VOCABULARY, repeat=TEXT_LENGTH):
        weight, passes = Fraction(1), []
        for place, token in enumerate(text):
            p, q = probs("target", text[:place])[token], probs("draft", text[:place])[token]
            weight *= p
            passes.append(min(Fraction(1), q / p) if p else Fraction(0))
        if weight:
            total += weight * expected(passes, length)  # type: ignore[arg-type]  # fractions: no rounding
    return total


@pytest.mark.parametrize("length", range(1, 7))
def test_replayed_texts_have_the_rounds_of_speculative_decoding(length: int):
    """Claim: the coins min(1, q(x) / p(x)) along texts of the target give exactly the expected rounds of speculative
    decoding, and the draft tokens that they verify, for chains of every length, the end of the text included. Source:
    libraries, "Predicting acceptance without bias". Conclusive: all texts of 3 tokens and length 5 and all draws of the
    algorithm, in fractions; the two sides share only the two distributions, and differ by 0."""
    assert mean_over_texts(expected_rounds, length) == rounds_by_enumeration(length)
    drafted = rounds_by_enumeration(length, lambda drafted: drafted)
    assert mean_over_texts(expected_draft_tokens, length) == drafted


@pytest.mark.parametrize("wrong", ["p over q", "one coin for all", "no end"])
def test_wrong_coins_are_found(wrong: str, monkeypatch):
    """Claim: the equality above fails for coins of the wrong direction, for a chain that goes on after a rejection, and
    for rounds that draft beyond the text: it can fail."""
    right = rounds_by_enumeration(3)
    total = Fraction(0)
    for text in itertools.product(VOCABULARY, repeat=TEXT_LENGTH):
        weight, passes = Fraction(1), []
        for place, token in enumerate(text):
            p, q = probs("target", text[:place])[token], probs("draft", text[:place])[token]
            weight *= p
            ratio = (p / q if q else Fraction(0)) if wrong == "p over q" else (q / p if p else Fraction(0))
            passes.append(min(Fraction(1), ratio))
        if wrong == "no end":
            passes = [*passes, Fraction(1), Fraction(1), Fraction(1)]
        if wrong == "one coin for all":
            passes = [sum(passes, Fraction(0)) / len(passes)] * len(passes)
        if weight:
            total += weight * expected_rounds(passes, 3)  # type: ignore[arg-type]  # fractions: no rounding
    assert total != right


def test_expected_rounds_at_the_ends():
    """Claim: a draft that never passes needs a round a token; one that always passes needs a round for k + 1 tokens."""
    assert expected_rounds([0.0] * 12, 3) == 12 and expected_rounds([1.0] * 12, 3) == 3
    assert expected_rounds([], 3) == 0
    assert expected_draft_tokens([0.0] * 12, 3) == 9 * 3 + 2 + 1 and expected_draft_tokens([1.0] * 12, 3) == 9


def test_break_even_is_where_the_rates_are_equal():
    """Claim: at the stated round trip and draft step the best number of draft tokens is as fast as plain decoding, and
    a little less is faster; the batch is the largest up to which each pays. Conclusive: of given times, so that nothing
    depends on the machine, the last ones pay with 4 sessions but not with 2."""

    def times(rtt_s: float = 0.0, draft_s: float = 0.002) -> Times:
        return Times(lambda rows: 0.02 + 0.002 * rows, lambda nodes: draft_s * nodes, rtt_s, lambda length: 0.001)

    def best_ratio(own: Times) -> float:
        return max(own.rate(mean, length) for length, mean in enumerate(tokens, 1)) * own.round_s(0)

    tokens = [1.6, 2.0, 2.2, 2.3]
    ends = break_even(tokens, times())
    assert best_ratio(times(rtt_s=ends.rtt_s)) == pytest.approx(1)
    assert best_ratio(times(draft_s=ends.draft_step_s)) == pytest.approx(1)
    assert best_ratio(times(rtt_s=0.9 * ends.rtt_s)) > 1 > best_ratio(times(rtt_s=1.1 * ends.rtt_s))
    assert break_even(tokens, times(rtt_s=0.004)).rtt_s == pytest.approx(ends.rtt_s)
    paying = [
        batch for batch in (1, 2, 4, 8, 16, 32, 64) if times().rate(1.6, 1, batch) * times().round_s(0, batch) > 1
    ]
    assert ends.batch >= max(paying)
    assert break_even([1.0, 1.0], times()).batch == 0
    steps_s = {1: 0.01, 2: 0.01, 4: 0.04, 8: 0.04}
    assert (
        break_even([1.5], Times(lambda rows: steps_s.get(int(rows), 1.0), *[lambda at: 0.0, 0.0, lambda at: 0.0])).batch
        == 1
    )


def test_the_interval_is_over_texts():
    """Claim: the interval holds the value, is a point where all texts agree, and is wider where whole texts differ than
    where tokens do: two texts of 100 tokens are two samples."""
    assert resampled([[1.0, 2.0]] * 9, share) == Estimate(0.5, 0.5, 0.5)
    few = resampled([[0.0, 100.0], [100.0, 100.0]], share)
    many = resampled([[float(index % 2), 1.0] for index in range(200)], share)
    assert few.value == many.value == 0.5
    assert few.high - few.low > 3 * (many.high - many.low) > 0
    assert many.low < 0.5 < many.high


def test_intervals_of_few_texts_hold():
    """Claim: the interval of 10 texts holds the mean of all texts in 0.95 of the cases. Conclusive: with the ends at
    0.025 of the resamples, as for many texts, it holds in 0.92 of these samples."""
    chance = random.Random(2)
    held = 0
    for _ in range(500):
        told = resampled([[chance.uniform(0.3, 0.7), 1.0] for _ in range(10)], share)
        held += told.low <= 0.5 <= told.high
    assert 0.93 <= held / 500 <= 0.97
    assert tail_of(10_000) == pytest.approx(0.025, abs=1e-4) and tail_of(10) < 0.015


def test_intervals_of_a_draft_that_is_seldom_right_hold():
    """Claim: where a draft is right on few prompts only, the interval of 64 prompts holds the acceptance of all, though
    the sample may have none of these; of a usual draft the one more prompt changes little. Conclusive: of prompts of
    which one in 40 passes half its tokens and the others 2 in 1,000, the bootstrap of the sample alone misses often.
    The uniform draws of the one more prompt have the mean one half."""
    chance = random.Random(5)
    held, missed = 0, 0
    for _ in range(100):
        sample = [[50.0 if chance.random() < 1 / 40 else 0.2, 100.0] for _ in range(64)]
        told, alone = resampled_part(sample), resampled(sample, share)
        assert told.value == alone.value and told.high - alone.high < 2 / 64
        held += told.low <= 0.5 / 40 + 0.002 * 39 / 40 <= told.high
        missed += not alone.low <= 0.5 / 40 + 0.002 * 39 / 40 <= alone.high
    assert held >= 93 and missed >= 15
    usual = [[chance.uniform(20, 80), 100.0] for _ in range(64)]
    told, alone = resampled_part(usual), resampled(usual, share)
    assert 0.85 < (told.high - told.low) / (alone.high - alone.low) < 1.15
    none = resampled_part([[0.0, 10.0]] * 64)
    assert none.low == none.value == 0 and 0.5 / 64 < none.high < 3 / 64


def test_calibration_and_concentration():
    """Claim: the calibration error is 0 for confidences that come true as often as they say, and their difference else;
    a tenth of the positions has a tenth of evenly spread disagreement, and all of what lies in one."""
    assert calibration_error(calibration_sums([0.75] * 4, [1, 1, 1, 0])) == pytest.approx(0)
    assert calibration_error(calibration_sums([0.95] * 10, [1, 0] * 5)) == pytest.approx(0.45)
    assert lorenz_share([1.0] * 50) == pytest.approx(0.1) and lorenz_share([0.0] * 19 + [3.0]) == 1


def test_a_line_through_points_and_the_rest_of_a_round():
    """Claim: between measured rounds the rest is interpolated, beyond them constant; a round of a measured length takes
    exactly as long as measured, and given steps replace the measured ones and keep the rest."""
    line = line_through([(0.0, 1.0), (2.0, 3.0), (4.0, 2.0)])
    assert [line(at) for at in (-1, 0, 1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0]
    target, draft = StepCurve(), StepCurve()
    target.prime(((1, 0.010), (2, 0.012), (4, 0.020)))
    draft.prime(((1, 0.002),))
    rounds_s = [(0.0, 0.011), (1.0, 0.016), (3.0, 0.030)]
    here = Served("", target, draft).times(rounds_s, (0.0, 0.0), 0.0, 0.0)
    assert [here.round_s(length) for length in (0, 1, 3)] == pytest.approx([own_s for _, own_s in rounds_s])
    elsewhere = Served("", target, draft).times(rounds_s, (0.005, 0.004), 0.1, 0.0)
    assert elsewhere.round_s(1) == pytest.approx(0.006 + 0.004 + 0.1 + (0.016 - 0.012 - 0.002))
    assert Served("", target, draft).times(rounds_s, (0.0, 0.0), 0.0, 0.5).round_s(0) == pytest.approx(0.51)


def test_a_heads_passes_are_on_the_targets_machine() -> None:
    """Claim: a head's round has no round trip, and its pass is scaled with the target's step where that is given, by
    nothing else. By hand: a step of 10 ms and a pass of 2 ms, elsewhere 5 ms."""
    target, passes = StepCurve(), StepCurve()
    target.prime(((1, 0.010), (2, 0.012)))
    passes.prime(((1, 0.002),))
    rounds_s = [(0.0, 0.011), (1.0, 0.016)]
    for given_s, step_s, pass_s in (
        ((0.0, 0.0), 0.012, 0.002),
        ((0.005, 0.0), 0.006, 0.001),
        ((0.0, 0.1), 0.012, 0.002),
    ):
        own = Served("", target, passes, is_head=True).times(rounds_s, given_s, 0.1, 0.0)
        assert own.rtt is None and own.draft(1) == pytest.approx(pass_s)
        assert own.round_s(1) == pytest.approx(step_s + pass_s + (0.016 - 0.012 - 0.002))
