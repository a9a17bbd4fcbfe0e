"""REJECTION keeps the target distribution exactly, and every known mistake is noticed."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from specdec.decoding import logits_processors as edits_module
from specdec.decoding import verification as verification_module
from specdec.protocol import rejection
from specdec.protocol.noise import Lane
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, SamplerOutput, TokenKind, Verdict
from tests.exactness.enumeration import Child, Path, Setting, base_two_distribution
from tests.exactness.exactness import (
    check_exactness,
    committed_count_distribution,
    output_distribution,
    target_output_distribution,
)


def target_table(vocabulary_size: int):
    """Logits that depend on the whole path, from 0 to 3."""
    token_ids = range(vocabulary_size)
    return lambda path: tuple((5 * t + 3 * sum(path) + 2 * len(path) + path[-1]) % 7 // 2 for t in token_ids)


def draft_table(vocabulary_size: int):
    """Another rule altogether: the draft is clearly unlike the target."""
    return lambda path: tuple((3 * t + len(path) + 2 * path[-1]) % 5 // 2 for t in range(vocabulary_size))


def varying_length(path: Path) -> int:
    """2, 0 or 1 draft tokens, by the path."""
    return (2 + 2 * sum(path) + len(path) - 1) % 3


def setting(
    params: ResolvedSamplingParams | None = None, vocabulary_size: int = 3, kind: type[Setting] = Setting, **changes
) -> Setting:
    """A small world in which everything can be enumerated."""
    facts = {
        "params": params or base_two_distribution(),
        "target": target_table(vocabulary_size),
        "draft": draft_table(vocabulary_size),
        "draft_length": varying_length,
        **changes,
    }
    return kind(**facts)


POLICIES = {
    "plain": {},
    "frequency and presence penalty": {"frequency_penalty": 1.0, "presence_penalty": 1.0},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_tokens": {"min_tokens": 2, "stop_token_ids": (1,)},
    "top_k, penalties and min_tokens": {"top_k": 2, "frequency_penalty": 1.0, "min_tokens": 1, "stop_token_ids": (2,)},
    "bad_words": {"bad_words": ((1, 2), (2, 2, 0), (0, 1))},
    "allowed_token_ids, bad_words and min_tokens": {
        "allowed_token_ids": (0, 2),
        "bad_words": ((2, 0), (0, 0, 2)),
        "min_tokens": 1,
        "stop_token_ids": (0,),
    },
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_output_has_the_target_distribution(policy: dict) -> None:
    """Claim: the joint distribution of the first three tokens is the target's, for a draft unlike it, draft lengths
    from 0 on that vary with the path, and draft tokens kept over rounds. Source: Leviathan et al. 2023, theorem 1.
    Conclusive: fractions over every cell of every draw, compared without tolerance.
    """
    check_exactness(setting(base_two_distribution(**policy)))


@pytest.mark.parametrize("vocabulary_size, length, ahead, count", [(5, 1, 0, 2), (4, 2, 0, 2), (3, 3, 0, 2)])
def test_larger_worlds(vocabulary_size: int, length: int, ahead: int, count: int) -> None:
    """The same claim for a vocabulary of 4 and 5 and for three draft tokens, over the first two tokens."""
    check_exactness(setting(None, vocabulary_size, draft_length=lambda path: length, ahead=ahead), count)


def test_the_worlds_are_not_trivial() -> None:
    """The checks above mean something: the draft is often rejected, and its distribution is far from the target's."""
    world = setting()
    counts = committed_count_distribution(world)
    assert set(counts) == {1, 2, 3} and all(share > Fraction(1, 20) for share in counts.values())
    distance = 0
    for path in [(0,), (0, 1), (0, 2)]:
        draft = {child.token_id: share for share, child in world.children(path)}
        distance += sum(abs(p - draft.get(t, 0)) for t, p in enumerate(world.target_distribution(path))) / 2
    assert distance / 3 > Fraction(1, 4)
    assert len(target_output_distribution(world, 3)) == 27


def residual_replaced_by_target(monkeypatch) -> Setting:
    """The recovered token is drawn from the target instead of the residual."""
    monkeypatch.setattr(verification_module, "residual", lambda target, lines, columns, probs: target)
    return setting()


def shared_lane(monkeypatch) -> Setting:
    """Recovered and bonus tokens are drawn with the number that decided the acceptance."""

    class SharedLane:
        NEXT = Lane.ACCEPT

    monkeypatch.setattr(verification_module, "Lane", SharedLane)
    return setting()


def skipped_bonus(monkeypatch) -> Setting:
    """A round whose tokens all pass ends with the last draft token."""
    real = rejection.decide

    def decide(rule, draft_token_ids, rows, output: SamplerOutput, accept_draws, parents=()) -> Verdict:
        verdict = real(rule, draft_token_ids, rows, output, accept_draws, parents)
        if verdict.next_kind is TokenKind.BONUS and draft_token_ids:
            return Verdict(verdict.accepted[:-1], draft_token_ids[-1], TokenKind.BONUS)
        return verdict

    monkeypatch.setattr(rejection, "decide", decide)
    return setting()


def bonus_from_the_wrong_position(monkeypatch) -> Setting:
    """The bonus token is the recovered token of the last draft token's own position."""
    real = rejection.decide

    def decide(rule, draft_token_ids, rows, output: SamplerOutput, accept_draws, parents=()) -> Verdict:
        verdict = real(rule, draft_token_ids, rows, output, accept_draws, parents)
        if verdict.next_kind is TokenKind.BONUS and draft_token_ids:
            return Verdict(verdict.accepted, output.recovered_token_ids[-2], TokenKind.BONUS)
        return verdict

    monkeypatch.setattr(rejection, "decide", decide)
    return setting()


def penalty_not_advanced(monkeypatch) -> Setting:
    """Penalties at every row of a round count the committed tokens only."""
    real = edits_module.draft_counts_before
    monkeypatch.setattr(edits_module, "draft_counts_before", lambda *arguments: torch.zeros_like(real(*arguments)))
    return setting(base_two_distribution(frequency_penalty=1.0))


def minimum_not_advanced(monkeypatch) -> Setting:
    """Stop tokens are masked at all rows of a round that starts too early, or at none."""
    monkeypatch.setattr(
        edits_module.PathContext,
        "masked_row_count",
        property(
            lambda self: (
                self.row_count if len(self.committed) < self.params.prompt_length + self.params.min_tokens else 0
            )
        ),
    )
    return setting(base_two_distribution(min_tokens=1, stop_token_ids=(1,)))


def words_of_committed_tokens(monkeypatch) -> Setting:
    """The draft tokens before a row do not begin a word there: only committed ones do."""
    real = edits_module.word_ends
    monkeypatch.setattr(
        edits_module,
        "word_ends",
        lambda words, committed, start, drafted, first: (
            real(words, committed, start, (), 0) * (len(drafted) + 1 - first)
        ),
    )
    return setting(base_two_distribution(bad_words=((1, 2), (2, 0))))


def words_of_one_round(monkeypatch) -> Setting:
    """A word that committed tokens begin is not found: only draft tokens begin one."""
    real = edits_module.word_ends
    monkeypatch.setattr(
        edits_module,
        "word_ends",
        lambda words, committed, start, drafted, first: real(words, committed, len(committed), drafted, first),
    )
    return setting(base_two_distribution(bad_words=((1, 2), (2, 0))))


def words_of_the_prompt(monkeypatch) -> Setting:
    """The prompt begins words too."""
    real = edits_module.word_ends
    monkeypatch.setattr(
        edits_module,
        "word_ends",
        lambda words, committed, start, drafted, first: real(words, committed, 0, drafted, first),
    )
    return setting(base_two_distribution(bad_words=((0, 2), (1, 2))))


class TruncatedAfterDrawing(Setting):
    """The draft distribution sent is cut to the likeliest and the drawn token after a draw from all of it."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        def cut(child: Child) -> DraftProbs:
            weight_of = dict(zip(child.draft_probs.token_ids, child.draft_probs.weights))
            kept = sorted({child.token_id, max(weight_of, key=weight_of.__getitem__)})
            return DraftProbs(tuple(kept), tuple(weight_of[token_id] for token_id in kept))

        return [(share, Child(child.token_id, cut(child))) for share, child in super().children(path)]


class ConfidenceCutOff(Setting):
    """Tokens are offered up to the first one the draft gave less than a third."""

    def offered_count(self, chain: tuple[Child, ...], count_max: int) -> int:
        sure = itertools.takewhile(lambda c: c.draft_probs.probability(c.token_id) >= 1 / 3, chain[:count_max])
        return len(list(sure))


class LikeliestOffered(Setting):
    """The likeliest token is offered instead of the drawn one, with a draft distribution it was not drawn from."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        row = super().children(path)[0][1].draft_probs
        return [(Fraction(1), Child(row.token_ids[row.weights.index(max(row.weights))], row))]


class UnlikelyNotSent(Setting):
    """A drawn token is not sent when another token is more than twice as likely."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        return [
            (
                share,
                Child(
                    c.token_id,
                    c.draft_probs,
                    2 * c.draft_probs.probability(c.token_id) >= max(c.draft_probs.probabilities),
                ),
            )
            for share, c in super().children(path)
        ]


class LongerOfTwo(Setting):
    """Two chains are drawn and tested independently; the one that commits more is taken."""

    def rounds(self, path: Path, chain: tuple[Child, ...]) -> dict[tuple[Path, tuple[Child, ...]], Fraction]:
        params: dict[tuple[Path, tuple[Child, ...]], Fraction] = {}
        once = super().rounds(path, ()).items()
        for ((first, _), share), ((second, _), part) in itertools.product(once, once):
            outcome = (second if len(second) > len(first) else first), ()
            params[outcome] = params.get(outcome, Fraction(0)) + share * part
        return params


class Malformed(Setting):
    """Every proposal is a token that its draft distribution lacks."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        row = super().children(path)[0][1].draft_probs
        absent = (path[-1] + 1) % self.vocabulary_size
        kept = [(t, w) for t, w in zip(row.token_ids, row.weights) if t != absent]
        return [(Fraction(1), Child(absent, DraftProbs(tuple(t for t, _ in kept), tuple(w for _, w in kept))))]


def missing_token_accepted(monkeypatch) -> Setting:
    """Draft distributions are not checked, and a draft probability of 0 passes every test."""
    monkeypatch.setattr(DraftProbs, "check_proposal", lambda self, token_id, vocabulary_size: None)
    monkeypatch.setattr(rejection, "accepts", lambda row, token, target, draw: draw * row.probability(token) < target)
    return setting(kind=Malformed)


MUTATIONS = {
    "residual replaced by target": residual_replaced_by_target,
    "shared random lane": shared_lane,
    "skipped bonus": skipped_bonus,
    "bonus from the wrong position": bonus_from_the_wrong_position,
    "penalty not advanced": penalty_not_advanced,
    "min_tokens not advanced": minimum_not_advanced,
    "bad words of committed tokens": words_of_committed_tokens,
    "bad words of one round": words_of_one_round,
    "bad words of the prompt": words_of_the_prompt,
    "truncated after drawing": lambda monkeypatch: setting(kind=TruncatedAfterDrawing),
    "confidence cut-off on the drawn token": lambda monkeypatch: setting(kind=ConfidenceCutOff),
    "likeliest child offered": lambda monkeypatch: setting(kind=LikeliestOffered),
    "unlikely drawn child not sent": lambda monkeypatch: setting(kind=UnlikelyNotSent),
    "longer of two paths": lambda monkeypatch: setting(kind=LongerOfTwo),
    "draft token missing from its row accepted": missing_token_accepted,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_every_mutation_is_noticed(mutate, monkeypatch) -> None:
    """Claim: the exactness check would find each of these mistakes. Conclusive: it is the same check, on the same
    functions, with one of them replaced; and without the replacement it passes (tests above and below).
    """
    world = mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check_exactness(world)


BIASED = [
    "shared random lane",
    "bonus from the wrong position",
    "truncated after drawing",
    "confidence cut-off on the drawn token",
    "likeliest child offered",
    "unlikely drawn child not sent",
    "longer of two paths",
    "draft token missing from its row accepted",
]


@pytest.mark.parametrize("name", BIASED)
def test_mutations_change_the_output_distribution_itself(name: str, monkeypatch) -> None:
    """Claim: these mistakes change the text, not only the token count. The distance is total variation, exact."""
    world = MUTATIONS[name](monkeypatch)
    found, wanted = output_distribution(world, 3), target_output_distribution(world, 3)
    distance = sum(abs(found.get(path, 0) - wanted.get(path, 0)) for path in found.keys() | wanted.keys()) / 2
    assert distance > Fraction(1, 200)


def test_a_malformed_draft_changes_nothing() -> None:
    """Claim: proposals missing from their draft distribution are dropped; the output keeps the target distribution.
    The mutation above accepts them."""
    world = setting(kind=Malformed)
    assert output_distribution(world, 3) == target_output_distribution(world, 3)
    assert committed_count_distribution(world) == {1: Fraction(1)}
