"""The coins that `specdec advise` reads off one pass along a text, against the real drafting, sampler and rules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest
import torch

from specdec.advise.agreement import Agreement, agreement_of, proposed
from specdec.advise.forecast import expected_draft_tokens, expected_rounds
from specdec.advise.measuring import Reading, Text
from specdec.advise.report import reached_of
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.rejection import decide
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.exactness.enumeration import (
    BASE_TWO,
    PROMPT,
    Child,
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


def head_table(path: Path, place: int) -> tuple[float, ...]:
    """Those of a head: of another distribution at every place of a chain, the first as the draft's."""
    return tuple(float((3 * t + len(path) + 2 * path[-1] + place * (2 * t + 3)) % 5 // 2) for t in range(SIZE))


class Headed(Setting):
    """A world whose draft is a head."""

    def chains(self, path: Path, chain: tuple[Child, ...], length: int) -> Iterator[tuple[Fraction, tuple[Child, ...]]]:
        if len(chain) >= length:
            yield Fraction(1), chain
            return
        own = self.cache.setdefault(len(chain), replace(self, draft=place_table(len(chain)), cache={}))
        assert isinstance(own, Setting)
        for share, child in own.children(path + tuple(one.token_id for one in chain)):
            for rest, longer in self.chains(path, (*chain, child), length):
                yield share * rest, longer


def place_table(place: int) -> Callable[[Path], tuple[float, ...]]:
    """The head's logits at one place of a chain."""
    return lambda path: head_table(path, place)


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
    text: Path,
    params: ResolvedSamplingParams,
    draft: Callable[[Path], tuple[float, ...]],
    prompt: Path = PROMPT,
    later: range = range(0),
) -> Agreement:
    """The agreement along a text that the target wrote after a prompt, from one row of each model a position; of a
    head also from those of the places `later` of a chain, that chains reach which begin in the text."""
    paths = [prompt + text[:count] for count in range(len(text))]
    target_rows, draft_rows, *deeper = (
        torch.tensor([table(path) for path in paths[first:]], dtype=torch.float32)
        for first, table in ((0, target_table), (0, draft), *((1 + n, place_table(own)) for n, own in enumerate(later)))
    )
    return agreement_of(target_rows, draft_rows, paths, torch.tensor(text), params, deeper)


def texts_of(setting: Setting, length: int) -> Iterator[tuple[Path, float]]:
    """All texts of the target of a length, each with its probability."""
    for text in itertools.product(range(SIZE), repeat=length):
        weight = Fraction(1)
        for place, token in enumerate(text):
            weight *= setting.target_distribution(PROMPT + text[:place])[token]
        yield text, float(weight)


def predicted(
    setting: Setting, params: ResolvedSamplingParams, length: int, later: range = range(0)
) -> tuple[float, float]:
    """The means over all texts of the target of forecast rounds and draft tokens; `later`: see `along`."""
    rounds = drafted = 0.0
    for text, weight in texts_of(setting, TEXT_LENGTH):
        own = along(text, params, setting.draft, later=later)
        coins = own.passes[Rule.REJECTION].tolist(), length, own.deeper[Rule.REJECTION].tolist() if later else ()
        rounds += weight * expected_rounds(*coins)
        drafted += weight * expected_draft_tokens(*coins)
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


@pytest.mark.parametrize("length", [2, 3])
def test_a_heads_coins_are_those_of_its_places(length: int) -> None:
    """Claim: with coins by place in a chain rounds and draft tokens are those of a head whose distribution changes from
    place to place. Conclusive: every draw of the real proposals, sampler and rule, as fractions; coins of one place
    later, and those of the first place for all, give other numbers."""
    drafted = world(Setting, place_table(0), length)
    setting = Headed(drafted.params, target_table, place_table(0), drafted.draft_length, ahead=0)
    params = replace(setting.params, rule=Rule.COUPLED)
    expected = [float(enumerated(setting, of_round)) for of_round in (lambda count: 1, lambda count: count)]
    assert predicted(setting, params, length, range(1, 4)) == pytest.approx(expected, **CLOSE)
    for mistaken in (range(2, 5), range(0)):
        assert abs(predicted(setting, params, length, mistaken)[0] - expected[0]) > 1e-3


@pytest.mark.parametrize("place", [0, 1, 2])
def test_acceptance_by_place_is_that_of_the_real_rule(place: int) -> None:
    """Claim: the acceptance of a chain's token, those before it accepted, is the share of the rounds that accept it
    among those that accept all before it. Conclusive: texts as long as the chain, so that one chain reaches the place,
    and every draw of the real rule; without the condition the number is another."""
    setting = Headed(base_two_distribution(), target_table, place_table(0), lambda path: place + 1, ahead=0)
    params = replace(setting.params, rule=Rule.COUPLED)
    sums = [0.0, 0.0, 0.0]
    for text, weight in texts_of(setting, place + 1):
        own = along(text, params, setting.draft, later=range(1, place + 1))
        reading = Reading(Text("", params, (*PROMPT, *text, 0), 0), own)
        numbers = [*reached_of([reading], place, Rule.REJECTION)[0], reading.coins(Rule.REJECTION)[place, place].item()]
        sums = [total + weight * number for total, number in zip(sums, numbers)]
    accepted = [
        float(sum(share for (committed, _), share in setting.rounds(PROMPT, ()).items() if len(committed) > least))
        for least in (place + 1, place)
    ]
    assert sums[:2] == pytest.approx(accepted, **CLOSE)
    assert place == 0 or abs(sums[0] / sums[1] - sums[2]) > 1e-3


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


def generated(
    params: ResolvedSamplingParams,
    length: int,
    count: int,
    salt: int,
    draft: Callable[[Path, int], tuple[float, ...]] = lambda path, place: draft_table(path),
) -> tuple[Path, int, int]:
    """A text by the real proposals, sampler and rule; its rounds and verified draft tokens. `salt`: of its prompt."""
    path: Path = (salt,)
    rounds = drafted = 0
    while len(path) < 1 + count:
        chain: Path = ()
        for _ in range(min(length, count - len(path))):
            logits = torch.tensor([draft(path + chain, len(chain))])
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


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_heads_coins_of_the_other_rules_give_the_very_rounds(temperature: float) -> None:
    """Claim: with coins by place in a chain, GREEDY and COUPLED give the very rounds and draft tokens of a head whose
    distribution changes from place to place, text by text. Conclusive: 40 prompts or seeds of 20 tokens, with no
    tolerance; coins of the first place for all do not fit."""
    misfits = 0
    for number in range(40):
        rule = Rule.COUPLED if temperature else Rule.GREEDY
        params = ResolvedSamplingParams(rule=rule, seed=number, prompt_length=1, temperature=temperature)
        path, rounds, drafted = generated(params, 4, 20, number, head_table)
        own = along(path[1:], params, place_table(0), path[:1], range(1, 4))
        told = own.passes[rule].tolist(), 4, own.deeper[rule].tolist()
        assert expected_rounds(*told) == rounds and expected_draft_tokens(*told) == drafted
        misfits += expected_rounds(*told[:2]) != rounds
    assert misfits > 10


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
