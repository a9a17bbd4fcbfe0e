"""REJECTION over trees with siblings and several proposers keeps the target distribution, and mistakes are noticed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from specdec.decoding import proposal as proposal_module
from specdec.decoding import verification as verification_module
from specdec.decoding.logits_processors import PathContext
from specdec.protocol import offer as offer_module
from specdec.protocol import rejection
from specdec.protocol.calibration import Calibration
from specdec.protocol.offer import Offer
from specdec.protocol.proposers import Run
from specdec.protocol.types import DraftProbs, Proposer, point_mass
from tests.exactness.enumeration import Path, base_two_distribution
from tests.exactness.siblings import SiblingWorld, Verdicts, joint_verdicts, ngram, walked_verdicts
from tests.exactness.test_exact_distribution import POLICIES, draft_table, target_table

pytestmark = pytest.mark.lengthy


def runs_after(vocabulary_size: int) -> Callable[[Path], list]:
    """One run after every path, or two; they depend on the path alone."""

    def runs(path: Path) -> list:
        first = (sum(path) + len(path)) % vocabulary_size
        found = [ngram(first, (first + 1) % vocabulary_size, strength=2 + 9 * (path[-1] % 2))]
        return found + ([ngram((first + 2) % vocabulary_size, strength=1)] if sum(path) % 2 else [])

    return runs


def world(vocabulary_size: int = 3, kind: type[SiblingWorld] = SiblingWorld, **changes) -> SiblingWorld:
    facts = {
        "params": base_two_distribution(),
        "target": target_table(vocabulary_size),
        "draft": draft_table(vocabulary_size),
        **changes,
    }
    return kind(**facts)


def check(own: SiblingWorld, count: int) -> None:
    """Raises AssertionError unless the output has the target distribution."""
    assert own.output(count) == own.wanted(count), "the output does not have the target distribution"


def check_jointly(own: SiblingWorld) -> Counter[Offer]:
    """Checks the first token over every tree, all draws of draft and target enumerated jointly, and that the walk row
    by row says the same of every offer. Returns the offers, by the number of their trees."""
    shares: dict[Offer, Fraction] = {}
    counts: Counter[Offer] = Counter()
    for share, nodes in own.trees((0,), own.depth):
        offer = own.offer((0,), nodes)
        shares[offer] = shares.get(offer, Fraction(0)) + share
        counts[offer] += 1
    assert sum(shares.values()) == 1
    found: Verdicts = {}
    for offer, share in shares.items():
        walked = {tokens: part for tokens, part in walked_verdicts(own, (0,), offer).items() if part}
        assert {tokens: part for tokens, part in joint_verdicts(own, (0,), offer).items() if part} == walked
        for tokens, part in walked.items():
            found[tokens[:1]] = found.get(tokens[:1], Fraction(0)) + share * part
    assert found == own.wanted(1)
    return counts


def test_all_draws_jointly() -> None:
    """Claim: for vocabulary 3, two children of each node, depth 2, the first token has the target distribution, with
    all draws of draft and target enumerated jointly; and enumerating the walk row by row gives the same for every
    of the 216 trees. Source: Chen et al. 2024; Miao et al. 2024. Conclusive: fractions over every cell, without
    tolerance; the second part justifies the recursion that the other tests use."""
    counts = check_jointly(world(is_joint=True))
    assert sum(counts.values()) == 6**3 and all(len(offer.token_ids) == 6 for offer in counts)


def mixed_after(vocabulary_size: int) -> Callable[[Path], list]:
    """A run of an n-gram and one of heads after every path: neither draws. They depend on the path alone."""

    def runs(path: Path) -> list:
        first = (sum(path) + len(path)) % vocabulary_size
        second = (first + 1) % vocabulary_size
        found = ngram(first, second, strength=2) if path[-1] % 2 else ngram(first, strength=11)
        return [found, Run(Proposer.HEADS, (second, path[-1]), 0, confidences=(5, 3))]

    return runs


@pytest.mark.parametrize("depth, row_max", [(1, 99), (2, 5), pytest.param(2, 99, marks=pytest.mark.more)])
def test_all_draws_of_mixed_sources_jointly(depth: int, row_max: int) -> None:
    """Claim: the same for trees of drawn tokens, n-grams and heads, whose tokens have all weight: siblings of several
    sources at one row, drawn tokens below those of a run, and tokens of a run below drawn ones. Conclusive: fractions
    over every cell, without tolerance; the recursion that the other tests use holds for mixed sources too."""
    counts = check_jointly(world(is_joint=True, runs=mixed_after(3), depth=depth, row_max=row_max))
    below, siblings = set(), set()
    for offer in counts:
        parents = offer.parents or tuple(range(len(offer.token_ids)))
        for index, parent in enumerate(parents):
            own = offer.proposers[index]
            below |= {(offer.proposers[parent - 1], own)} if parent else set()
            siblings |= {frozenset((own, offer.proposers[n])) for n in range(index) if parents[n] == parent}
    draft, others = Proposer.DRAFT, (Proposer.NGRAM, Proposer.HEADS)
    assert siblings >= {frozenset((draft, other)) for other in others}
    assert depth == 1 or below >= {(draft, Proposer.HEADS), (Proposer.NGRAM, draft)}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_output_has_the_target_distribution(policy: dict) -> None:
    """Claim: the joint distribution of the first three tokens is the target's, with two drawn siblings and runs of
    other proposers at every node, over several rounds, for all edits and truncations."""
    check(world(params=base_two_distribution(**policy), runs=runs_after(3), depth=1), 3)
    check(world(params=base_two_distribution(**policy), runs=runs_after(3)), 2)


@pytest.mark.parametrize(
    "vocabulary_size, drawn, depth, row_max", [(4, 2, 1, 99), (4, 3, 1, 3), (3, 1, 2, 3), (3, 3, 1, 99)]
)
def test_other_shapes(vocabulary_size: int, drawn: int, depth: int, row_max: int) -> None:
    """The same claim for more siblings, a larger vocabulary, and few rows, which cut the tree best first."""
    shape = {"drawn_count": drawn, "depth": depth, "row_max": row_max, "runs": runs_after(vocabulary_size)}
    check(world(vocabulary_size, **shape), 2)


class GrownAlongFirstDraws(SiblingWorld):
    """The draft evaluates the child drawn first, as it does where it draws siblings."""

    def grown(self, drawn: tuple[int, ...], probs: DraftProbs) -> tuple[int, ...]:
        return drawn[:1]


def sure_below(path: Path) -> tuple[int, ...]:
    """Logits of a draft that is unsure of the first token and sure of the next."""
    return (0, 1, 0) if len(path) == 1 else (0, 5, 0)


def strong_run(path: Path) -> list:
    """A run of one token, surer than the draft's first."""
    return [ngram(path[-1], strength=4)]


class AsSureAsTheDraft(Calibration):
    """First draws come true as often as the likeliest token's share says, siblings half as often as they do not: then
    nodes far below compete with siblings."""

    def probability(self, features: Any, prior: float) -> float:
        if isinstance(features[0], tuple):
            (_, rank, confidence), _ = features
            share = offer_module.BIN_CONFIDENCES[confidence - 1]
            prior = (1 - share) / 2 if rank else share
        return super().probability(features, prior)


@pytest.mark.parametrize("row_max", [2, 3, 4])
@pytest.mark.parametrize("kind", [SiblingWorld, GrownAlongFirstDraws])
def test_few_rows_for_guesses_and_what_lies_below_them(kind: type[SiblingWorld], row_max: int) -> None:
    """The same claim where nodes further down, below a run's token or the child drawn first, compete with a drawn
    sibling for the rows: which of them there are must not depend on the sibling's token."""
    facts = {"kind": kind, "row_max": row_max, "calibration": AsSureAsTheDraft()}
    check(world(**facts, draft=sure_below, runs=strong_run), 2)
    check(world(**facts, runs=lambda path: [ngram(sum(path) % 3, strength=11)]), 2)


def learned() -> Calibration:
    """What outcomes teach: siblings come true where the likeliest token was not drawn before them, else not."""
    calibration = Calibration()
    for probs, rank, was_drawn in itertools.product(
        (DraftProbs((0, 1, 2), (100 - low, low, 1)) for low in range(1, 100)), (1, 2), (False, True)
    ):
        for _ in range(20):
            calibration.record(offer_module.drawn_features(probs, rank, was_drawn)[0], not was_drawn)
    return calibration


@pytest.mark.parametrize("row_max", [2, 3])
@pytest.mark.parametrize("kind", [SiblingWorld, GrownAlongFirstDraws])
def test_siblings_expected_by_the_tokens_before_them(kind: type[SiblingWorld], row_max: int) -> None:
    """The same claim where a sibling is offered only if the likeliest token was not drawn before it."""
    facts = {"kind": kind, "row_max": row_max, "calibration": learned()}
    check(world(**facts, runs=lambda path: [ngram(sum(path) % 3, strength=1)]), 2)
    own = world(**facts)
    offers = [(nodes[0,][0][0], own.offer((0,), nodes)) for _, nodes in own.trees((0,), 2)]
    alone = {first for first, offer in offers if offer.parents.count(0) < 2}
    assert 0 < len(alone) < 3, "the token before a sibling decides whether it is offered"


def test_the_worlds_are_not_trivial() -> None:
    """The checks above mean something: runs and drawn siblings stand in both orders, drawn tokens equal those of runs,
    second siblings are accepted, and every sibling is rejected now and then."""
    own = world(runs=runs_after(3))
    orders, accepted = set(), set()
    for path in ((0,), (0, 1), (0, 2)):
        for _, nodes in own.trees(path, 1):
            offer = own.offer(path, nodes)
            orders.add(tuple(guess[0][0].name for guess in offer.guesses))
            drawn, _ = nodes[path]
            accepted |= {("skipped", drawn[0] == own.runs(path)[0].token_ids[0])}
            for tokens, share in walked_verdicts(own, path, offer).items():
                accepted.add(("second", bool(share) and len(tokens) > 1 and tokens[0] != offer.token_ids[0]))
                accepted.add(("none", bool(share) and len(tokens) == 1))
    assert len(orders) > 2 and {"skipped", "second", "none"} == {name for name, was in accepted if was}


class LongestOfIndependentPaths(SiblingWorld):
    """Every path is tested as a chain by itself; the one that commits most is taken."""

    def round(self, path: Path) -> Verdicts:
        found: Verdicts = {}
        for share, nodes in self.trees(path, self.depth):
            drawn, probs = nodes[path]
            chains = [walked_verdicts(self, path, Offer((token_id,), (), (probs,))) for token_id in drawn]
            for parts in itertools.product(*(chain.items() for chain in chains)):
                tokens = max((tokens for tokens, _ in parts), key=len)
                part = parts[0][1] * parts[1][1]
                found[tokens] = found.get(tokens, Fraction(0)) + share * part
        return found


class DrawnWithReplacement(SiblingWorld):
    """Siblings are drawn independently, and tested as if the second could not be the first."""

    def draws(self, path: Path) -> list:
        once = [(share, drawn[0], probs) for share, drawn, probs in world_of_one(self).draws(path)]
        return [
            (first * second, (one, two), probs)
            for (first, one, probs), (second, two, _) in itertools.product(once, once)
        ]

    def offer(self, path: Path, nodes: dict) -> Offer:
        drawn, probs = nodes[path]
        return Offer(drawn, (0, 0), (probs, probs))


def drawn_with_replacement(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """Then the second is a token that its distribution lacks: a draft probability of 0 passes every test."""
    monkeypatch.setattr(rejection, "accepts", lambda row, token, target, draw: draw * row.probability(token) < target)
    return world(kind=DrawnWithReplacement, depth=1)


def world_of_one(own: SiblingWorld) -> SiblingWorld:
    return SiblingWorld(own.params, own.target, own.draft, drawn_count=1)


class LikeliestFirst(SiblingWorld):
    """Drawn siblings are offered in the order of their probabilities."""

    def sent(self, drawn: tuple[int, ...], probs: DraftProbs, evaluated: set[int]) -> list:
        return [(token_id, True, probs) for token_id in sorted(drawn, key=lambda t: -probs.probability(t))]


class SentIfEvaluated(SiblingWorld):
    """A second sibling is sent only if the draft evaluated it, and it evaluates likely ones only."""

    def sent(self, drawn: tuple[int, ...], probs: DraftProbs, evaluated: set[int]) -> list:
        kept = [t for t in drawn[1:] if 3 * probs.probability(t) >= max(probs.probabilities)]
        return [(token_id, True, probs) for token_id in (drawn[0], *kept)]


class SourceByToken(SiblingWorld):
    """The run is offered first only where the token drawn first is another one."""

    def offer(self, path: Path, nodes: dict) -> Offer:
        drawn, probs = nodes[path]
        token_id = self.runs(path)[0].token_ids[0]
        if drawn[0] != token_id:
            return Offer((token_id, drawn[0]), (0, 0), (point_mass(token_id), probs))
        return Offer((drawn[0],), (), (probs,))


class Merged(SiblingWorld):
    """A drawn token equal to that of a run takes the run's place, and its distribution."""

    def offer(self, path: Path, nodes: dict) -> Offer:
        drawn, probs = nodes[path]
        token_id = self.runs(path)[0].token_ids[0]
        if drawn[0] == token_id:
            return Offer((token_id,), (), (probs,))
        return Offer((token_id,), (), (point_mass(token_id),))


class MadeUpProbability(SiblingWorld):
    """A run's token is offered with a probability of a half that it was not drawn with."""

    def offer(self, path: Path, nodes: dict) -> Offer:
        token_id = self.runs(path)[0].token_ids[0]
        other = (token_id + 1) % self.vocabulary_size
        return Offer((token_id,), (), (DraftProbs(tuple(sorted((token_id, other))), (1, 1)),))


def drawn_once_tested_with(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """Siblings are drawn without replacement, and each is tested against the whole draft distribution."""
    drawn = DraftProbs.without
    monkeypatch.setattr(DraftProbs, "without", lambda self, token_ids: self)
    real = proposal_module.proposal_of_weights

    def with_real_draws(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DraftProbs, "without", drawn)
            return real(*arguments)

    monkeypatch.setattr(proposal_module, "proposal_of_weights", with_real_draws)
    own = world(depth=1)
    draws = SiblingWorld.draws
    monkeypatch.setattr(SiblingWorld, "draws", lambda self, path: real_draws(self, path, drawn, draws))
    return own


def real_draws(own: SiblingWorld, path: Path, without: Callable, draws: Callable) -> list:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftProbs, "without", without)
        return draws(own, path)


def residual_not_carried(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """Every sibling is tested against the whole target distribution, and the recovered token drawn from it."""
    monkeypatch.setattr(verification_module, "residual", lambda target, lines, columns, probs: target)
    return world(depth=1)


def sibling_against_the_whole_target(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """A later sibling is tested against the whole target distribution; the recovered token is drawn as it should be."""
    left_after, normalise = verification_module.residual, verification_module.normalised
    held: dict[str, Any] = {}

    def normalised(masses, lines):
        held["left"] = normalise(masses, lines)
        return held["target"]

    def residual(target, *entries):
        left = held.pop("left", None)
        if left is None:
            left = held["target"] = target
        return left_after(left, *entries)

    monkeypatch.setattr(verification_module, "normalised", normalised)
    monkeypatch.setattr(verification_module, "residual", residual)
    return world(depth=1)


def one_uniform(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """All siblings are tested with one uniform number."""
    real = rejection.accept_draws

    def draws(seed, round_index, base_position, parents, count):
        found = real(seed, round_index, base_position, parents, count)
        rows = parents or range(count)
        return [found[list(rows).index(parent)] for parent in rows]

    monkeypatch.setattr(rejection, "accept_draws", draws)
    return world(depth=1)


def in_row_order(feature: dict) -> Callable[[pytest.MonkeyPatch], SiblingWorld]:
    """Penalties, min_tokens and bad_words see the draft tokens of the rows before, whatever their path."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
        contexts = property(lambda self: [PathContext(self.params, self.committed, self.draft_token_ids)])
        monkeypatch.setattr(verification_module.VerificationRequest, "contexts", contexts)
        return world(params=base_two_distribution(**feature), depth=1, is_joint=True)

    return mutate


def skipped_order(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """A sibling is offered although one drawn before it is not."""
    real = offer_module._drawn
    monkeypatch.setattr(offer_module, "_drawn", lambda *arguments: real(*arguments)[1:])
    return world(depth=1)


def expected_by_itself(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """A sibling is offered only if neither it nor one before it is the likeliest token."""
    real = offer_module._drawn

    def drawn(remote, siblings, calibration):
        nodes = real(remote, siblings, calibration)
        probs = remote.draft_probs
        likeliest = probs and probs.token_ids[probs.weights.index(max(probs.weights))]
        ends = [index for index, node in enumerate(nodes) if index and node.token_id == likeliest]
        return nodes[: min(ends, default=len(nodes))]

    monkeypatch.setattr(offer_module, "_drawn", drawn)
    return world(depth=1)


class GrownBelowTheLikelier(SiblingWorld):
    """The draft evaluates the likelier of two drawn siblings only."""

    def grown(self, drawn: tuple[int, ...], probs: DraftProbs) -> tuple[int, ...]:
        return (max(drawn, key=probs.probability),)


def grown_below_a_guess(monkeypatch: pytest.MonkeyPatch) -> SiblingWorld:
    """A run's token goes on with the draft's nodes whenever the draft drew it too."""
    below = lambda remote, token_id, is_sure: remote.children.get(token_id)  # noqa: E731
    monkeypatch.setattr(offer_module, "_remote_below", below)
    return world(draft=sure_below, row_max=2, runs=strong_run, calibration=AsSureAsTheDraft())


MUTATIONS = {
    "longest of independently tested paths": lambda patch: world(kind=LongestOfIndependentPaths, depth=1),
    "drawn with replacement, tested without": drawn_with_replacement,
    "drawn without replacement, tested with": drawn_once_tested_with,
    "residual not carried to the next sibling": residual_not_carried,
    "residual not carried to the test alone": sibling_against_the_whole_target,
    "one uniform for all siblings": one_uniform,
    "likelihood-ordered siblings": lambda patch: world(kind=LikeliestFirst, depth=1),
    "a sibling sent only if it was evaluated": lambda patch: world(kind=SentIfEvaluated, depth=1),
    "first child's source chosen by the token drawn": lambda patch: world(
        kind=SourceByToken, depth=1, runs=runs_after(3)
    ),
    "equal tokens of two sources merged": lambda patch: world(kind=Merged, depth=1, runs=runs_after(3)),
    "a made-up probability": lambda patch: world(kind=MadeUpProbability, depth=1, runs=runs_after(3)),
    "penalties counted in row order": in_row_order({"frequency_penalty": 1.0}),
    "min_tokens counted in row order": in_row_order({"min_tokens": 2, "stop_token_ids": (1,)}),
    "bad words found in row order": in_row_order({"bad_words": ((1, 2, 0), (2, 1, 0), (0, 2, 1))}),
    "a sibling offered without the one drawn before it": skipped_order,
    "a sibling's estimate knows the sibling": expected_by_itself,
    "rows left to a sibling by what lies below the likelier": lambda patch: world(
        kind=GrownBelowTheLikelier,
        row_max=2,
        runs=lambda path: [ngram(sum(path) % 3, strength=11)],
        calibration=AsSureAsTheDraft(),
    ),
    "rows left to a drawn token by what lies below a guess": grown_below_a_guess,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_every_mutation_is_noticed(mutate, monkeypatch) -> None:
    """Claim: the check finds each of these mistakes: a verdict with other breakpoints, or another distribution.
    Conclusive: it is the same check, on the same functions, with one of them replaced."""
    own = mutate(monkeypatch)
    with pytest.raises(AssertionError):
        check(own, 2)
