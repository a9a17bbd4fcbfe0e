"""The coins that `specdec advise` reads off one pass along a text, against the real drafting, sampler and rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch

from specdec.advise.agreement import Agreement, agreement_of, proposed
from specdec.advise.forecast import expected_draft_tokens, expected_rounds
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.rejection import decide
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.exactness.enumeration import (
    BASE_TWO,
    PROMPT,
    Path,
    Setting,
    base_two_distribution,
    sampled_distribution_as_fractions,
)

SIZE = 3
TEXT_LENGTH = 4  # of the enumerated texts
CLOSE = {"rel": 0, "abs": 1e-12}  # doubles beside fractions


def target_table(path: Path) -> tuple[int, ...]:
    """Whole-number logits of the target."""
    return tuple((5 * t + 3 * sum(path) + 2 * len(path) + path[-1]) % 7 // 2 for t in range(SIZE))


def draft_table(path: Path) -> tuple[float, ...]:
    """Those of a draft that is clearly unlike it."""
    return tuple(float((3 * t + len(path) + 2 * path[-1]) % 5 // 2) for t in range(SIZE))


def part_table(path: Path) -> tuple[float, ...]:
    """Those of a draft without token 1."""
    return tuple(-math.inf if token == 1 else value for token, value in enumerate(draft_table(path)))


class Colder(Setting):
    """A world at half the temperature: a difference of logits of 1 is a factor of 4."""

    def target_distribution(self, path: Path) -> tuple[Fraction, ...]:
        doubled = tuple(2 * logit for logit in self.target(path))
        return sampled_distribution_as_fractions(self.params, doubled, path)


WORLDS = {"a whole draft": (Setting, draft_table), "a part": (Setting, part_table), "colder": (Colder, draft_table)}


def world(kind: type[Setting], draft: Callable[[Path], tuple[float, ...]], length: int) -> Setting:
    """Rounds of `length` draft tokens that end with the text, as those of a generation do."""
    params = replace(base_two_distribution(), temperature=BASE_TWO / 2 if kind is Colder else BASE_TWO)

    def drafted(path: Path) -> int:
        return min(length, TEXT_LENGTH - (len(path) - len(PROMPT)) - 1)

    return kind(params, target_table, draft, drafted, ahead=0)


def enumerated(setting: Setting, of_round: Callable[[int], int]) -> Fraction:
    """The expected sum over the rounds that write a text of a function of their draft tokens: every draw of the draft,
    the sampler and the rule."""

    @cache
    def rest(path: Path) -> Fraction:
        if len(path) == len(PROMPT) + TEXT_LENGTH:
            return Fraction(0)
        after = (share * rest(path + committed) for (committed, _), share in setting.rounds(path, ()).items())
        return of_round(setting.draft_length(path)) + sum(after, Fraction(0))

    return rest(PROMPT)


def along(
    text: Path, params: ResolvedSamplingParams, draft: Callable[[Path], tuple[float, ...]], prompt: Path = PROMPT
) -> Agreement:
    """The agreement along a text that the target wrote after a prompt, from one row of each model a position."""
    paths = [prompt + text[:count] for count in range(len(text))]
    target_rows, draft_rows = (
        torch.tensor([table(path) for path in paths], dtype=torch.float32) for table in (target_table, draft)
    )
    return agreement_of(target_rows, draft_rows, paths, torch.tensor(text), params)


def predicted(setting: Setting, params: ResolvedSamplingParams, length: int) -> tuple[float, float]:
    """The means over all texts of the target, each with its probability, of forecast rounds and draft tokens."""
    rounds = drafted = 0.0
    for text in itertools.product(range(SIZE), repeat=TEXT_LENGTH):
        weight = Fraction(1)
        for place, token in enumerate(text):
            weight *= setting.target_distribution(PROMPT + text[:place])[token]
        passes = along(text, params, setting.draft).passes[Rule.REJECTION].tolist()
        rounds += float(weight) * expected_rounds(passes, length)
        drafted += float(weight) * expected_draft_tokens(passes, length)
    return rounds, drafted


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("name", WORLDS)
def test_rejections_coins_give_the_rounds_of_the_real_rule(name: str, length: int) -> None:
    """Claim: the coins of REJECTION along texts drawn under COUPLED give the expected rounds and verified draft tokens
    of real generations under REJECTION: for a draft with all tokens and with a part, at two temperatures. Conclusive:
    all texts of 4 of 3 tokens, and every draw of the real proposals, sampler and rule, as fractions; coins of another
    temperature give another number."""
    setting = world(*WORLDS[name], length)
    params = replace(setting.params, rule=Rule.COUPLED)
    rounds, drafted = predicted(setting, params, length)
    assert rounds == pytest.approx(float(enumerated(setting, lambda count: 1)), **CLOSE)
    assert drafted == pytest.approx(float(enumerated(setting, lambda count: count)), **CLOSE)
    other = predicted(setting, replace(params, temperature=1.3 * params.temperature), length)
    assert abs(other[0] - rounds) > 1e-3


@pytest.mark.parametrize("name", WORLDS)
def test_rejections_acceptance_is_that_of_the_real_rule(name: str) -> None:
    """Claim: at every path the acceptance is the probability that the real rule accepts the draft's first token, and
    the mean of the coins over the text's next token is the same. Conclusive: 1 - TV of the whole distributions is not,
    as the distribution is sent with rounded weights."""
    setting = world(*WORLDS[name], 1)
    params = replace(setting.params, rule=Rule.COUPLED)
    differs = False
    for path in [(), (0,), (1,), (2,), (1, 2), (2, 0)]:
        outcomes = setting.rounds(PROMPT + path, ()).items()
        expected = float(sum(share for (committed, _), share in outcomes if len(committed) == 2))
        own = [along((*path, token), params, setting.draft) for token in range(SIZE)]
        assert own[0].accepted[Rule.REJECTION][-1].item() == pytest.approx(expected, **CLOSE)
        shares = map(float, setting.target_distribution(PROMPT + path))
        mean = sum(share * one.passes[Rule.REJECTION][-1].item() for share, one in zip(shares, own))
        assert mean == pytest.approx(expected, **CLOSE)
        differs |= abs(1 - own[0].variation[-1].item() - expected) > 1e-7
    assert differs


def generated(params: ResolvedSamplingParams, length: int, count: int, salt: int) -> tuple[Path, int, int]:
    """A text by the real proposals, sampler and rule; its rounds and verified draft tokens. `salt`: of its prompt."""
    path: Path = (salt,)
    rounds = drafted = 0
    while len(path) < 1 + count:
        chain: Path = ()
        for _ in range(min(length, count - len(path))):
            logits = torch.tensor([draft_table(path + chain)])
            chain += (proposed(logits, [path + chain], params)[0],)
        rows = torch.tensor([target_table(path + chain[:size]) for size in range(len(chain) + 1)], dtype=torch.float32)
        (output,) = verify([VerificationRequest(params, rounds, path, chain)], [len(chain) + 1], rows)
        verdict = decide(params.rule, chain, (), output, ())
        path += (*chain[: verdict.accepted_count], verdict.next_token_id)
        rounds, drafted = rounds + 1, drafted + len(chain)
    return path, rounds, drafted


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_coins_of_the_other_rules_give_the_very_rounds(temperature: float, length: int) -> None:
    """Claim: under GREEDY, and under COUPLED with the seed, coins are 0 or 1 and give the very number of rounds and of
    verified draft tokens of the real generation, text by text; so their distributions are equal too.
    Conclusive: 40 prompts or seeds of 20 tokens, with no tolerance; coins of another seed do not fit."""
    misfits, seen = 0, set[float]()
    for number in range(40):
        rule = Rule.COUPLED if temperature else Rule.GREEDY
        params = ResolvedSamplingParams(rule=rule, seed=number, prompt_length=1, temperature=temperature)
        path, rounds, drafted = generated(params, length, 20, number)
        told, other = (
            along(path[1:], own, draft_table, path[:1]).passes[rule].tolist()
            for own in (params, replace(params, seed=number + 1))
        )
        seen |= set(told)
        assert expected_rounds(told, length) == rounds and expected_draft_tokens(told, length) == drafted
        misfits += expected_rounds(other, length) != rounds
    assert seen == {0.0, 1.0} and (misfits > 10 if temperature else not misfits)


def test_coupled_acceptance_is_that_of_shared_noise() -> None:
    """Claim: the mean of COUPLED's coins over draws is the probability that two distributions with the same Gumbel
    noise have their highest score at one token, sum over x of 1 / sum over y of max(p(y) / p(x), q(y) / q(x)): less
    than the 1 - TV of REJECTION. 20,000 draws, a limit of 4.5 standard deviations."""
    count, p, q = 20_000, torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    params = ResolvedSamplingParams(rule=Rule.COUPLED, seed=9, prompt_length=1, temperature=1.0)
    paths = [range(1 + place) for place in range(count)]
    target_rows, draft_rows = (probs.log().expand(count, SIZE).contiguous() for probs in (p, q))
    following = torch.tensor(proposed(target_rows, paths, params))
    own = agreement_of(target_rows, draft_rows, paths, following, params)
    ratios = torch.maximum(p[None] / p[:, None], q[None] / q[:, None])
    expected = float((1 / ratios.sum(1)).sum())
    assert expected < 0.7 - 0.05
    limit = 4.5 * math.sqrt(expected * (1 - expected) / count)
    assert abs(own.accepted[Rule.COUPLED].mean().item() - expected) < limit
    assert own.accepted[Rule.REJECTION].mean().item() == pytest.approx(0.7, abs=1e-3)
    coins = own.passes[Rule.REJECTION].mean().item()
    assert abs(coins - 0.7) < 4.5 * 0.5 / math.sqrt(count)
