"""Exact output distributions of trees with siblings and several proposers, as fractions, by enumeration.

The real functions propose, grow, offer, verify and decide. A verification's verdict is piecewise constant in its
uniform numbers: `joint_verdicts` evaluates every combination of cells of all of them, near both ends of each cell;
`walked_verdicts` does so row by row along the walk, which is cheap, and equal (test_siblings.py proves it).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from unittest import mock

import torch

from specdec.decoding import proposal as proposal_module
from specdec.decoding import verification as verification_module
from specdec.decoding.proposal import ProposalRequest
from specdec.decoding.verification import VerificationRequest
from specdec.protocol import rejection
from specdec.protocol.calibration import Calibration
from specdec.protocol.noise import Lane
from specdec.protocol.offer import Limits, Offer, make_offer
from specdec.protocol.proposers import Run
from specdec.protocol.tree import ReceivedTree
from specdec.protocol.tree_shape import children as children_of
from specdec.protocol.types import DraftNode, DraftProbs, Proposer, ResolvedSamplingParams, Rule
from tests.exactness.enumeration import (
    INSET,
    PROMPT,
    Legal,
    Path,
    Table,
    packed_masks,
    sampled_distribution_as_fractions,
)

Verdicts = dict[Path, Fraction]
Key = tuple[Lane, int]
Drawn = tuple[int, ...]  # tokens drawn for a node, in order
Level = tuple[tuple[int, ...], tuple[DraftProbs, ...]]  # the children of a row: tokens and their distributions


@dataclass
class SiblingWorld:
    """A target, a draft that draws `drawn_count` children for each node of a tree of depth `depth`, runs of the
    coordinator's own proposers, and the rows of a verification. Subclasses misbehave. Cached by path. `legal`,
    `is_draft_masked`: as in `Setting`."""

    params: ResolvedSamplingParams
    target: Table
    draft: Table
    drawn_count: int = 2
    depth: int = 2
    runs: Callable[[Path], list[Run]] = lambda path: []
    row_max: int = 99
    is_joint: bool = False
    legal: Legal | None = None
    is_draft_masked: bool = True
    calibration: Calibration = field(default_factory=Calibration)
    prompt: Path = PROMPT
    cache: dict[object, object] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        return len(self.target(self.prompt))

    def distribution(self, path: Path) -> tuple[Fraction, ...]:
        """The target distribution after a path, from the formulas."""
        return sampled_distribution_as_fractions(self.params, self.target(path), path, self.legal)

    def masks(self, path: Path, offer: Offer) -> torch.Tensor | None:
        """The masks of the rows of a verification. Subclasses misbehave."""
        return packed_masks(self.legal, [path + tokens for tokens in row_paths(offer)], self.vocabulary_size)

    def lines(self, path: Path, offer: Offer) -> list[tuple[int, ...]]:
        """The logits of the rows of a verification. Subclasses compute them in another way, or misbehave."""
        return [self.target(path + tokens) for tokens in row_paths(offer)]

    def draws(self, path: Path) -> list[tuple[Fraction, Drawn, DraftProbs | None]]:
        """Everything the real draft side can draw for a node, with its probability, by the cells of its draws."""
        key = ("draws", path)
        if key not in self.cache:
            probs = self.propose(path, (0,) * self.drawn_count)[1]
            if probs is None:  # no token that the draft knows is legal
                return self.cache.setdefault(key, [(Fraction(1), (), None)])
            found = []
            for order in itertools.permutations(range(len(probs.token_ids)), min(self.drawn_count, len(probs.weights))):
                share, bits, left = Fraction(1), [], probs
                for index in order:
                    token_id = probs.token_ids[index]
                    place = left.token_ids.index(token_id)
                    low = sum(left.weights[:place])
                    share *= Fraction(left.weights[place], left.total)
                    bits.append(-(-low * (1 << 53) // left.total))  # the first integer of the cell
                    left = left.without([token_id]) if len(left.token_ids) > 1 else left
                drawn, again = self.propose(path, tuple(bits))
                assert drawn == tuple(probs.token_ids[index] for index in order), "cells of the draws"
                found.append((share, drawn, again))
            self.cache[key] = found
        return self.cache[key]

    def propose(self, path: Path, draws: tuple[int, ...]) -> tuple[Drawn, DraftProbs | None]:
        """The tokens that the real draft side draws, and their distribution."""
        request = ProposalRequest(self.params, path, self.vocabulary_size, draws, len(draws) - 1)
        logits = torch.tensor([self.draft(path)], dtype=torch.float32)
        masks = packed_masks(self.legal if self.is_draft_masked else None, [path], self.vocabulary_size)
        (made,) = proposal_module.propose([request], logits, masks)
        return tuple(token_id for token_id, _ in made.guesses[: len(draws)]), made.draft_probs

    def trees(self, path: Path, depth: int) -> Iterator[tuple[Fraction, dict[Path, tuple[Drawn, DraftProbs]]]]:
        """Every tree the draft can draw below a path: the draws of each node, by path."""
        if not depth:
            yield Fraction(1), {}
            return
        for share, drawn, probs in self.draws(path):
            grown = self.grown(drawn, probs)
            below = [list(self.trees((*path, token_id), depth - 1 if token_id in grown else 0)) for token_id in drawn]
            for parts in itertools.product(*below):
                nodes = {path: (drawn, probs)}
                for _, part in parts:
                    nodes |= part
                yield share * math.prod((part for part, _ in parts), start=Fraction(1)), nodes

    def grown(self, drawn: Drawn, probs: DraftProbs) -> Drawn:
        """The children of a node that the draft evaluates: all of them, as if it had time for every node."""
        return drawn

    def sent(self, drawn: Drawn, probs: DraftProbs, evaluated: set[int]) -> list[tuple[int, bool, DraftProbs]]:
        """The children that the draft sends for a node: (token, may be offered, distribution). `evaluated`: those with
        draws of their own."""
        return [(token_id, True, probs) for token_id in drawn]

    def offer(self, path: Path, nodes: dict[Path, tuple[Drawn, DraftProbs]]) -> Offer:
        """The real offer below a path, from the real tree."""
        tree = ReceivedTree(list(path))
        names = {path: 0}
        for parent, (drawn, probs) in nodes.items():
            evaluated = {token_id for token_id in drawn if (*parent, token_id) in nodes}
            for token_id, is_offered, own in self.sent(drawn, probs, evaluated):
                names.setdefault((*parent, token_id), len(names))
                sent = DraftNode(names[*parent, token_id], names[parent], token_id, is_offered, own)
                tree.add(1, len(path), sent)
        limits = Limits(self.row_max, 99, siblings=self.drawn_count - 1)
        return make_offer(tree.root, self.runs(path), Rule.REJECTION, limits, self.calibration)

    def round(self, path: Path) -> Verdicts:
        """The distribution of the tokens that one round commits."""
        key = ("round", path)
        if key not in self.cache:
            found: Verdicts = {}
            for share, nodes in self.trees(path, self.depth):
                offer = self.offer(path, nodes)
                verdicts = joint_verdicts(self, path, offer) if self.is_joint else walked_verdicts(self, path, offer)
                for committed, part in verdicts.items():
                    found[committed] = found.get(committed, Fraction(0)) + share * part
            self.cache[key] = found
        return self.cache[key]

    def output(self, count: int, path: Path | None = None) -> Verdicts:
        """The joint distribution of the next `count` tokens after a path, or the prompt, over as many rounds as they
        need."""
        path = self.prompt if path is None else path
        if count <= 0:
            return {(): Fraction(1)}
        found: Verdicts = {}
        for committed, share in self.round(path).items():
            for rest, part in self.output(count - len(committed), path + committed).items():
                tokens = (*committed, *rest)[:count]
                found[tokens] = found.get(tokens, Fraction(0)) + share * part
        return {tokens: share for tokens, share in found.items() if share}

    def wanted(self, count: int, path: Path | None = None) -> Verdicts:
        """The joint distribution of the next `count` tokens of the target alone, after a path or the prompt."""
        path = self.prompt if path is None else path
        if not count:
            return {(): Fraction(1)}
        return {
            (token_id, *rest): share * part
            for token_id, share in enumerate(self.distribution(path))
            if share
            for rest, part in self.wanted(count - 1, (*path, token_id)).items()
        }


def tests_of(
    target: Sequence[Fraction], tokens: Sequence[int], probs: Sequence[DraftProbs]
) -> tuple[list[Fraction], list[Fraction]]:
    """The acceptance probability of each child of a row if those before it were rejected, and what is left after all:
    Chen et al. 2024, Miao et al. 2024, in fractions."""
    left, tested, ratios = list(target), [], []
    for token_id, own in zip(tokens, probs):
        weights = {t: w for t, w in zip(own.token_ids, own.weights) if t not in tested}
        draft = [Fraction(weights.get(t, 0), sum(weights.values())) for t in range(len(left))]
        ratios.append(min(Fraction(1), left[token_id] / draft[token_id]) if draft[token_id] else Fraction(1))
        residual = [max(Fraction(0), p - q) for p, q in zip(left, draft)]
        left = [mass / sum(residual) for mass in residual] if sum(residual) else left
        tested.append(token_id)
    return ratios, left


def walked_verdicts(world: SiblingWorld, path: Path, offer: Offer) -> Verdicts:
    """The verdicts of an offer, each row of the walk enumerated by itself."""
    following = children_of(offer.parents, len(offer.token_ids))

    def walk(row: int, tokens: Path) -> Verdicts:
        level = (
            tuple(offer.token_ids[index] for index in following[row]),
            tuple(offer.draft_probs[index] for index in following[row]),
        )
        found: Verdicts = {}
        for (accepted, token_id), share in level_verdicts(world, path + tokens, level).items():
            if accepted is None:
                found[*tokens, token_id] = found.get((*tokens, token_id), Fraction(0)) + share
            else:
                for committed, part in walk(following[row][accepted] + 1, (*tokens, level[0][accepted])).items():
                    found[committed] = found.get(committed, Fraction(0)) + share * part
        return found

    return walk(0, ())


def level_verdicts(world: SiblingWorld, path: Path, level: Level) -> dict[tuple[int | None, int], Fraction]:
    """The verdicts on one row and its children: (the child accepted, -1), or (None, the row's recovered token)."""
    key = ("level", path, level)
    if key not in world.cache:
        tokens, probs = level
        offer = Offer(tokens, (0,) * len(tokens) if len(tokens) > 1 else (), probs, ())
        found: dict[tuple[int | None, int], Fraction] = {}
        for verdict, share in evaluated_cells(world, path, offer):
            outcome = (verdict.accepted[0], -1) if verdict.accepted else (None, verdict.next_token_id)
            found[outcome] = found.get(outcome, Fraction(0)) + share
        world.cache[key] = found
    return world.cache[key]


def joint_verdicts(world: SiblingWorld, path: Path, offer: Offer) -> Verdicts:
    """The verdicts of an offer, all draws of the verification enumerated jointly."""
    found: Verdicts = {}
    for verdict, share in evaluated_cells(world, path, offer):
        committed = (*(offer.token_ids[index] for index in verdict.accepted), verdict.next_token_id)
        found[committed] = found.get(committed, Fraction(0)) + share
    return found


def keys_of(world: SiblingWorld, path: Path, offer: Offer) -> tuple[list[int], list[Key]]:
    """The key of the draw that the real code uses for each draft token's test, and for each row's recovered token."""
    asked: list[int] = []

    def recording(seed: int, lane: Lane, round_index: int, key: int) -> float:
        asked.append(key)
        return float(len(asked) - 1)

    count = len(offer.token_ids)
    with mock.patch.object(rejection, "uniform", recording):
        draws = rejection.accept_draws(world.params.seed, 0, len(path), offer.parents, count)
    accept = [asked[int(draw)] for draw in draws]
    taken: list[Key] = []

    def recording_next(seed: int, lane: Lane, round_index: int, key: int) -> float:
        taken.append((lane, key))
        return 0.0

    sampled(world, path, offer, recording_next, 1)
    return accept, taken


def sampled(world: SiblingWorld, path: Path, offer: Offer, uniform: Callable, count: int) -> list:
    """The real sampler output of `count` verifications that differ in round_index only."""
    tree = offer.token_ids, offer.draft_probs, offer.parents
    requests = [VerificationRequest(world.params, index, path, *tree) for index in range(count)]
    lines = world.lines(path, offer)
    logits = torch.tensor(lines * count, dtype=torch.float32)
    masks = world.masks(path, offer)
    masks = None if masks is None else masks.repeat(count, 1)
    with mock.patch.object(verification_module, "uniform", uniform):
        return verification_module.verify(requests, [len(lines)] * count, logits, masks=masks)


def row_paths(offer: Offer) -> list[Path]:
    """The draft tokens before each row."""
    paths: list[Path] = [()]
    parents = offer.parents or range(len(offer.token_ids))
    for parent, token_id in zip(parents, offer.token_ids):
        paths.append((*paths[parent], token_id))
    return paths


def cells(world: SiblingWorld, path: Path, offer: Offer) -> dict[Key, list[Fraction]]:
    """The breakpoints of every draw of a verification. Draws with one key are one variable."""
    accept, taken = keys_of(world, path, offer)
    bounds: dict[Key, set[Fraction]] = {}
    for row, (tokens, following) in enumerate(zip(row_paths(offer), children_of(offer.parents, len(offer.token_ids)))):
        own = [offer.token_ids[index] for index in following]
        probs = [offer.draft_probs[index] for index in following]
        ratios, left = tests_of(world.distribution(path + tokens), own, probs)
        for index, ratio in zip(following, ratios):
            bounds.setdefault((Lane.ACCEPT, accept[index]), {Fraction(0), Fraction(1)}).add(ratio)
        sums = itertools.accumulate(left)
        bounds.setdefault(taken[row], {Fraction(0), Fraction(1)}).update(value / sum(left) for value in sums)
    return {key: sorted(values) for key, values in bounds.items()}


def evaluated_cells(world: SiblingWorld, path: Path, offer: Offer) -> list[tuple[object, Fraction]]:
    """One verdict per combination of cells, with its share; near both ends of each cell it must be the same."""
    accept, _ = keys_of(world, path, offer)
    bounds = cells(world, path, offer)
    variables = list(bounds)
    combinations = list(itertools.product(*(list(itertools.pairwise(bounds[key])) for key in variables)))
    both = []
    for end in (INSET, 1 - INSET):
        draws = [
            {key: float(low + (high - low) * end) for key, (low, high) in zip(variables, combination)}
            for combination in combinations
        ]
        outputs = sampled(
            world, path, offer, lambda seed, lane, index, key, draws=draws: draws[index][lane, key], len(draws)
        )
        both.append(
            [
                rejection.decide(
                    Rule.REJECTION,
                    offer.token_ids,
                    offer.draft_probs,
                    output,
                    [own[Lane.ACCEPT, key] for key in accept],
                    offer.parents,
                )
                for own, output in zip(draws, outputs)
            ]
        )
    assert both[0] == both[1], "a verdict changes inside a cell: the code has a breakpoint that the formulas lack"
    shares = [math.prod((high - low for low, high in one), start=Fraction(1)) for one in combinations]
    return list(zip(both[0], shares))


def ngram(*token_ids: int, strength: int = 4) -> Run:
    """A run of a proposer that does not draw."""
    return Run(Proposer.NGRAM, token_ids, strength)
