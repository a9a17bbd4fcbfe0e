"""Exact output distributions of rule, sampler output and drafting together, as fractions, by enumeration.

Every random draw enters through a uniform number, and the code's result is piecewise constant in each number. So the
real functions are evaluated once near both ends of every cell between breakpoints, must agree there, and are weighted
with the cell's length. Logits are whole numbers and the temperature is 1 / ln 2, so probabilities are powers of two up
to the normaliser and all cells are fractions; no evaluation falls on a breakpoint, so rounding cannot blur a result.
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
from specdec.decoding.masks import word_count
from specdec.decoding.proposal import ProposalRequest
from specdec.decoding.verification import VerificationRequest
from specdec.errors import InvalidRequest
from specdec.protocol import rejection
from specdec.protocol.calibration import Calibration
from specdec.protocol.noise import Lane
from specdec.protocol.offer import Limits, make_offer
from specdec.protocol.tree import ReceivedTree
from specdec.protocol.types import DraftNode, DraftProbs, ResolvedSamplingParams, Rule, SamplerOutput
from tests.support.trees import OwnTree

BASE_TWO = 1 / math.log(2)  # the temperature at which a logit difference of 1 is a factor of 2
PROMPT = (0,)
INSET = Fraction(1, 1 << 30)  # share of a cell between its end and the point of evaluation

Path = tuple[int, ...]
Table = Callable[[Path], tuple[int, ...]]  # whole-number logits after a path
Legal = Callable[[Path], frozenset[int]]  # the legal tokens after a path; none after one that is illegal itself


def base_two_distribution(**policy: object) -> ResolvedSamplingParams:
    """REJECTION parameters whose probabilities are powers of two, up to the normaliser, for whole-number logits."""
    own = {"seed": 11, "prompt_length": len(PROMPT), "temperature": BASE_TWO, **policy}
    return ResolvedSamplingParams(Rule.REJECTION, **own)


@dataclass(frozen=True)
class Child:
    """A token drawn for a node, and its draft distribution; `sent` False: the draft does not send it."""

    token_id: int
    draft_probs: DraftProbs
    sent: bool = True


@dataclass
class Setting:
    """A target, a draft, sampling parameters and the draft's behaviour; subclasses misbehave. Cached by path.

    `prompt`: the path at which the output begins. `draft_length`: the cap at a path. The draft keeps its tree `ahead`
    tokens longer than the cap; the next round uses the part of the tree that is left after a commit. `legal`: what
    masks say, if there are any; `is_draft_masked`: whether the draft has them too.
    """

    params: ResolvedSamplingParams
    target: Table
    draft: Table
    draft_length: Callable[[Path], int]
    ahead: int = 1
    legal: Legal | None = None
    is_draft_masked: bool = True
    prompt: Path = PROMPT
    cache: dict[object, object] = field(default_factory=dict)

    @property
    def vocabulary_size(self) -> int:
        return len(self.target(self.prompt))

    def lines(self, path: Path, tokens: Path) -> list[tuple[int, ...]]:
        """The logits of the rows of a verification of a chain. Subclasses compute them in another way, or misbehave."""
        return [self.target(path + tokens[:offset]) for offset in range(len(tokens) + 1)]

    def target_distribution(self, path: Path) -> tuple[Fraction, ...]:
        """The target distribution after a path, from the formulas, in fractions."""
        return sampled_distribution_as_fractions(self.params, self.target(path), path, self.legal)

    def masks(self, path: Path, tokens: Path) -> torch.Tensor | None:
        """The masks of the rows of a verification of a chain. Subclasses misbehave."""
        return packed_masks(self.legal, [path + tokens[:end] for end in range(len(tokens) + 1)], self.vocabulary_size)

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        """Every token the real `propose` can draw after `path`, with its draft distribution and probability."""
        key = ("children", path)
        if key not in self.cache:
            row = self.proposals(path, [0])[0].draft_probs
            if row is None:  # no token that the draft knows is legal
                return self.cache.setdefault(key, [])
            bounds = [0, *itertools.accumulate(row.weights)]
            ends = [-(-bound * (1 << 53) // row.total) for bound in bounds]  # the first integer of each cell
            lows = self.proposals(path, ends[:-1])
            highs = self.proposals(path, [end - 1 for end in ends[1:]])
            assert [p.token_id for p in lows] == [p.token_id for p in highs] == list(row.token_ids), "cells of the draw"
            assert all(p.draft_probs == row for p in lows + highs), "a row does not depend on the draw"
            shares = [Fraction(weight, row.total) for weight in row.weights]
            self.cache[key] = [(share, Child(p.token_id, p.draft_probs)) for share, p in zip(shares, lows)]
        return self.cache[key]

    def proposals(self, path: Path, draws: list[int]) -> list[proposal_module.Proposal]:
        """The proposals of the real draft side after `path`, one for each 53-bit draw."""
        requests = [ProposalRequest(self.params, path, self.vocabulary_size, (bits,)) for bits in draws]
        logits = torch.tensor([self.draft(path)] * len(draws), dtype=torch.float32)
        masks = packed_masks(self.legal if self.is_draft_masked else None, [path] * len(draws), self.vocabulary_size)
        return proposal_module.propose(requests, logits, masks)

    def offered_count(self, chain: tuple[Child, ...], count_max: int) -> int:
        """The number of drawn tokens that are offered: as many as allowed, whatever the tokens."""
        return min(len(chain), count_max)

    def chains(self, path: Path, chain: tuple[Child, ...], length: int) -> Iterator[tuple[Fraction, tuple[Child, ...]]]:
        """Every way the draft can extend `chain`, which starts after `path`, to `length` tokens."""
        if len(chain) >= length or (chain and not chain[-1].sent):
            yield Fraction(1), chain
            return
        following = self.children(path + tuple(c.token_id for c in chain))
        if not following:
            yield Fraction(1), chain
        for share, child in following:
            for rest, longer in self.chains(path, (*chain, child), length):
                yield share * rest, longer

    def rounds(self, path: Path, chain: tuple[Child, ...]) -> dict[tuple[Path, tuple[Child, ...]], Fraction]:
        """The distribution of one round: committed tokens, and the rest of the draft's chain below them."""
        key = ("rounds", path, chain)
        if key not in self.cache:
            outcomes: dict[tuple[Path, tuple[Child, ...]], Fraction] = {}
            length_max = self.draft_length(path)
            for share, longer in self.chains(path, chain, length_max + self.ahead):
                for part, outcome in self.outcomes(path, longer, length_max):
                    outcomes[outcome] = outcomes.get(outcome, Fraction(0)) + share * part
            self.cache[key] = outcomes
        return self.cache[key]

    def outcomes(
        self, path: Path, chain: tuple[Child, ...], length_max: int
    ) -> list[tuple[Fraction, tuple[Path, tuple[Child, ...]]]]:
        """Every outcome of a round for one drawn chain, through the real tree, sampler and rule."""
        tree = grown_tree(path, chain, self.vocabulary_size)
        tokens, rows = chain_offer(tree, self.offered_count(chain, length_max))
        results = []
        for share, committed in self.verdicts(path, tokens, rows):
            left = chain[len(committed) :] if committed == tuple(c.token_id for c in chain[: len(committed)]) else ()
            tree = grown_tree(path, chain, self.vocabulary_size)
            tree.commit(committed)
            tree.check()
            kept = len(tree.proposal_path(len(chain)))
            results.append((share, (committed, left[:kept])))
        return results

    def verdicts(self, path: Path, tokens: Path, rows: tuple[DraftProbs, ...]) -> list[tuple[Fraction, Path]]:
        """The tokens a verification of `tokens` commits, with probabilities, over all cells of its draws."""
        key = ("verdicts", path, tokens, rows)
        if key not in self.cache:
            cells = self.cells(path, tokens, rows)
            both = [verdicts_in_cells(self, path, tokens, rows, cells, end) for end in (INSET, 1 - INSET)]
            assert both[0] == both[1], "a verdict changes inside a cell: the code has a breakpoint the formulas lack"
            self.cache[key] = both[0]
        return self.cache[key]

    def cells(self, path: Path, tokens: Path, rows: tuple[DraftProbs, ...]) -> dict[tuple[Lane, int], list[Fraction]]:
        """The breakpoints of every draw the verification uses. Draws with one key are one variable."""
        bounds: dict[tuple[Lane, int], set[Fraction]] = {}
        for offset, lane in enumerate(lanes_of_recovered(self, path, tokens, rows)):
            target = self.target_distribution(path + tokens[:offset])
            masses = target
            if offset < len(tokens):
                draft = [probability(rows[offset], token) for token in range(len(target))]
                residual = tuple(max(Fraction(0), t - d) for t, d in zip(target, draft))
                masses = residual if sum(residual) else target
                ratio = target[tokens[offset]] / draft[tokens[offset]] if draft[tokens[offset]] else Fraction(1)
                bounds.setdefault((Lane.ACCEPT, len(path) + offset), {Fraction(0), Fraction(1)}).add(min(ratio, 1))
            sums = itertools.accumulate(masses)
            bounds.setdefault((lane, len(path) + offset), {Fraction(0), Fraction(1)}).update(
                value / sum(masses) for value in sums
            )
        return {variable: sorted(values) for variable, values in bounds.items()}


def probability(row: DraftProbs, token_id: int) -> Fraction:
    """The probability of a token in a draft distribution, as a fraction."""
    return Fraction(dict(zip(row.token_ids, row.weights)).get(token_id, 0), row.total)


def sampled_distribution_as_fractions(
    params: ResolvedSamplingParams, logits: tuple[int, ...], path: Path, legal: Legal | None = None
) -> tuple[Fraction, ...]:
    """The target distribution of docs/exactness.md for whole-number logits at temperature 1 / ln 2, no min_p or bias.

    Each of the first steps leaves out tokens, unless none would remain. A repetition penalty must leave whole numbers.
    """
    output = path[params.prompt_length :]
    every = frozenset(range(len(logits)))
    stops = frozenset(params.stop_token_ids) if len(output) < params.min_tokens else frozenset()
    kept_tokens = every
    words = frozenset(
        word[-1] for word in params.bad_words if output[max(0, len(output) - len(word) + 1) :] == word[:-1]
    )
    allowed = frozenset(params.allowed_token_ids) or every
    for kept in (every if legal is None else legal(path), allowed, every - words, every - stops):
        kept_tokens = kept_tokens & kept or kept_tokens
    scores = {}
    for token in sorted(kept_tokens):
        count, logit = output.count(token), logits[token]
        if params.repetition_penalty != 1 and token in path[params.encoder_length :]:
            logit *= Fraction(params.repetition_penalty) ** (-1 if logit > 0 else 1)
        scores[token] = logit - int(params.presence_penalty) * (count > 0) - int(params.frequency_penalty) * count
    likeliest = sorted(scores, key=lambda token: (-scores[token], token))[: params.top_k or None]
    weights = {token: Fraction(2) ** scores[token] for token in likeliest}
    kept, before, total = [], Fraction(0), sum(weights.values())
    for token in likeliest:
        if before < Fraction(params.top_p) * total:
            kept.append(token)
        before += weights[token]
    return tuple(weights[t] / sum(weights[k] for k in kept) if t in kept else Fraction(0) for t in range(len(logits)))


def packed_masks(legal: Legal | None, paths: Sequence[Path], vocabulary_size: int) -> torch.Tensor | None:
    """The masks of rows after these paths, bit by bit."""
    if legal is None:
        return None
    masks = torch.zeros(len(paths), word_count(vocabulary_size), dtype=torch.int32)
    for row, path in enumerate(paths):
        for token_id in legal(path):
            masks[row, token_id // 32] |= 1 << token_id % 32 if token_id % 32 < 31 else -(1 << 31)
    return masks


def grown_tree(path: Path, chain: tuple[Child, ...], vocabulary_size: int) -> ReceivedTree:
    """The coordinator's tree after the chain arrived, read up to the first malformed token as on the wire."""
    tree = OwnTree(path)
    for node, child in enumerate(chain, start=1):
        try:
            child.draft_probs.check_proposal(child.token_id, vocabulary_size)
        except InvalidRequest:
            break
        if not child.sent:
            break
        tree.add(1, len(path), DraftNode(node, node - 1, child.token_id, True, child.draft_probs))
    return tree


def chain_offer(tree: ReceivedTree, length: int) -> tuple[Path, tuple[DraftProbs, ...]]:
    """The tokens and distributions of the real offer of a chain of at most `length` tokens."""
    offer = make_offer(tree.root, [], Rule.REJECTION, Limits(length, 99), Calibration())
    assert not offer.parents
    return offer.token_ids, offer.draft_probs


def sampler_outputs(
    setting: Setting, path: Path, tokens: Path, rows: tuple[DraftProbs, ...], uniform: Callable, count: int
) -> list[SamplerOutput]:
    """The real sampler output of `count` verifications that differ in round_index only, with `uniform` as noise."""
    requests = [VerificationRequest(setting.params, index, path, tokens, rows) for index in range(count)]
    lines = setting.lines(path, tokens)
    logits = torch.tensor(lines * count, dtype=torch.float32)
    with mock.patch.object(verification_module, "uniform", uniform):
        masks = setting.masks(path, tokens)
        masks = None if masks is None else masks.repeat(count, 1)
        return verification_module.verify(requests, [len(lines)] * count, logits, masks=masks)


def lanes_of_recovered(setting: Setting, path: Path, tokens: Path, rows: tuple[DraftProbs, ...]) -> list[Lane]:
    """The lane from which the sampler really draws, per position."""
    asked = []

    def recording(seed: int, lane: Lane, round_index: int, position: int) -> float:
        asked.append((lane, position))
        return 0.0

    sampler_outputs(setting, path, tokens, rows, recording, 1)
    assert [position for _, position in asked] == [len(path) + offset for offset in range(len(tokens) + 1)]
    return [lane for lane, _ in asked]


def verdicts_in_cells(
    setting: Setting,
    path: Path,
    tokens: Path,
    rows: tuple[DraftProbs, ...],
    cells: dict[tuple[Lane, int], list[Fraction]],
    end: Fraction,
) -> list[tuple[Fraction, Path]]:
    """One verdict per combination of cells, each draw taken at the share `end` of its cell."""
    variables = list(cells)
    spans = [[(low, high) for low, high in itertools.pairwise(cells[v])] for v in variables]
    combinations = list(itertools.product(*spans))
    draws = [
        {v: float(low + (high - low) * end) for v, (low, high) in zip(variables, combination)}
        for combination in combinations
    ]
    found = sampler_outputs(
        setting, path, tokens, rows, lambda seed, lane, index, position: draws[index][lane, position], len(draws)
    )
    results = []
    for combination, drawn, verify in zip(combinations, draws, found):
        accept_draws = [drawn[Lane.ACCEPT, len(path) + offset] for offset in range(len(tokens))]
        verdict = rejection.decide(Rule.REJECTION, tokens, rows, verify, accept_draws)
        share = math.prod((high - low for low, high in combination), start=Fraction(1))
        results.append((share, (*tokens[: verdict.accepted_count], verdict.next_token_id)))
    return results
