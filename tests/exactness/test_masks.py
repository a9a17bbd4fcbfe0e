"""Masks of legal tokens: REJECTION keeps the target distribution under them, on chains and trees, and mistakes fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from specdec.decoding import masks as masks_module
from specdec.decoding import proposal as proposal_module
from specdec.decoding import verification as verification_module
from specdec.decoding.masks import masked, word_count
from specdec.decoding.proposal import ProposalRequest, propose
from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.offer import Offer
from specdec.protocol.types import DraftProbs, ResolvedSamplingParams, Rule
from tests.exactness.enumeration import (
    PROMPT,
    Child,
    Path,
    Setting,
    base_two_distribution,
    packed_masks,
)
from tests.exactness.exactness import check_exactness, output_distribution, target_output_distribution
from tests.exactness.siblings import SiblingWorld
from tests.exactness.test_exact_distribution import POLICIES, setting
from tests.exactness.test_siblings import check, check_jointly, runs_after, world

World = Setting | SiblingWorld
SIZE = 4
EVERY = frozenset(range(SIZE))


def legal_next(path: Path) -> frozenset[int]:
    """One, two or three of the four tokens, by the whole path: each after some path, and each alone after some."""
    key = sum(path) + 5 * len(path) + 3 * path[-1]
    return frozenset((key + offset) % SIZE for offset in range(1 + key // 2 % 3))


def legal(path: Path) -> frozenset[int]:
    """`legal_next`, and none after a path that is not legal itself: there is no state for a mask."""
    steps = range(len(PROMPT), len(path))
    return legal_next(path) if all(path[end] in legal_next(path[:end]) for end in steps) else frozenset()


def chain(kind: type[Setting] = Setting, is_draft_masked: bool = True, legal=legal, **policy: object) -> Setting:
    """A world of chains with masks."""
    facts = {"legal": legal, "is_draft_masked": is_draft_masked}
    return setting(base_two_distribution(**policy), SIZE, kind, **facts)


def tree(
    kind: type[SiblingWorld] = SiblingWorld, is_draft_masked: bool = True, legal=legal, depth: int = 1, **policy: object
) -> SiblingWorld:
    """A world of trees with masks: two drawn children of each node beside the runs of other proposers."""
    facts = {"legal": legal, "is_draft_masked": is_draft_masked, "depth": depth, "runs": runs_after(SIZE)}
    return world(SIZE, kind, params=base_two_distribution(**policy), **facts)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("is_draft_masked", [True, False], ids=["draft masked", "draft not masked"])
def test_chains_keep_the_target_distribution(policy: dict, is_draft_masked: bool) -> None:
    """Claim: under masks that follow the path the joint distribution of the first three tokens is the target's, over
    several rounds, with every step of the target distribution behind the masks; also for a draft that sends illegal
    tokens. Conclusive: fractions over every cell of every draw, compared without tolerance with the formulas, which
    leave out illegal tokens first."""
    check_exactness(chain(is_draft_masked=is_draft_masked, **policy))


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("is_draft_masked", [True, False], ids=["draft masked", "draft not masked"])
def test_trees_keep_the_target_distribution(policy: dict, is_draft_masked: bool) -> None:
    """The same claim for trees: drawn siblings beside runs that do not know the masks, so illegal tokens stand in the
    tree, and their rows have masks without a legal token."""
    check(tree(is_draft_masked=is_draft_masked, **policy), 3)


@pytest.mark.lengthy
@pytest.mark.parametrize("is_draft_masked", [True, False], ids=["draft masked", "draft not masked"])
def test_deep_trees_jointly(is_draft_masked: bool) -> None:
    """The same claim for trees of depth 2, all draws of draft and target enumerated jointly for the first token."""
    facts = {"legal": three_legal, "is_draft_masked": is_draft_masked, "is_joint": True}
    check_jointly(world(**facts))
    check(tree(is_draft_masked=is_draft_masked, depth=2), 2)


def three_legal(path: Path) -> frozenset[int]:
    """Two of three tokens, or one."""
    return frozenset(token_id for token_id in range(3) if (token_id + sum(path) + len(path)) % 3 > len(path) % 2)


class OfAnotherVocabulary(Setting):
    """The draft has no token 0 and no token 1, as with another tokenizer: minus infinity for these."""

    def proposals(self, path: Path, draws: list[int]) -> list[proposal_module.Proposal]:
        logits = torch.tensor([[-math.inf, -math.inf, *self.draft(path)[2:]]] * len(draws))
        masks = packed_masks(self.legal, [path] * len(draws), SIZE)
        return proposal_module.propose(
            [ProposalRequest(self.params, path, SIZE, (bits,)) for bits in draws], logits, masks
        )


def test_a_draft_without_legal_tokens_proposes_nothing() -> None:
    """Claim: where no token that the draft has is legal it proposes nothing, and the output keeps the target
    distribution. Conclusive: the enumeration, and a look at the places without proposals."""
    own = chain(kind=OfAnotherVocabulary)
    check_exactness(own)
    paths = [path for path in target_output_distribution(own, 3)]
    nothing = [path for path in paths if not own.children(PROMPT + path)]
    assert 0 < len(nothing) < len(paths)
    assert all(not legal(PROMPT + path) & {2, 3} for path in nothing)


def test_the_masks_are_not_trivial() -> None:
    """The checks above mean something: drawn and guessed tokens are illegal, legal ones are rejected, tokens are legal
    on one branch and not on its sibling, and min_tokens meets masks that leave nothing but the stop token."""
    own = tree(is_draft_masked=False)
    offers = [own.offer(PROMPT, nodes) for _, nodes in own.trees(PROMPT, 1)]
    assert any(not set(offer.token_ids) <= legal(PROMPT) for offer in offers)
    siblings = [legal((*PROMPT, token_id)) for token_id in legal(PROMPT)]
    assert len(set(siblings)) == len(siblings) > 1
    paths = [PROMPT, *(PROMPT + path for path in target_output_distribution(chain(), 2))]
    assert any(legal(path) == {1} for path in paths), "min_tokens of POLICIES would leave nothing there"
    assert {len(legal(path)) for path in paths} == {1, 2, 3}


@pytest.mark.parametrize("width", [1, 7, 31, 32, 33, 96, 1000])
def test_every_bit_is_its_token(width: int) -> None:
    """Claim: a legal token's logit keeps its bits and every other one is -inf, whatever lies beyond the width, by the
    kernels of a CPU, by its table and by the shifts of a device; rows without a legal token stay, and are told.
    Conclusive: every bit of random masks against a mask read bit by bit in Python; rows apart in memory, too."""
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(20, width, generator=generator)
    shape = (20, word_count(width) + 1)
    masks = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    masks[3], masks[4] = 0, -1
    bits = [[bool(row[token_id // 32] >> token_id % 32 & 1) for token_id in range(width)] for row in masks.tolist()]
    wanted = torch.where(torch.tensor(bits), logits, -math.inf)
    is_empty = torch.tensor([not any(row) for row in bits])
    wanted[is_empty] = logits[is_empty]
    wider = torch.randn(20, width + 5, generator=generator)[:, :width].copy_(logits)
    for rows in (logits, wider):
        found, told = masked(rows, masks)
        assert torch.equal(found, wanted) and torch.equal(told, is_empty) and told[3] and not told[4]
        for name in ("kernels_for", "is_device"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(masks_module, name, lambda _, name=name: name == "is_device")
                found, told = masked(rows, masks)
                assert torch.equal(found, wanted) and torch.equal(told, is_empty)


ROWS, WIDTH = 6, 3000
RULES = {Rule.GREEDY: 0.0, Rule.COUPLED: 0.8, Rule.REJECTION: 0.8}


def batch(rule: Rule, **policy: object) -> tuple[list[VerificationRequest], list[ProposalRequest], torch.Tensor]:
    """A verification and a proposal of each of six rows."""
    params = ResolvedSamplingParams(rule, seed=3, prompt_length=1, temperature=RULES[rule], **policy)
    verifications = [VerificationRequest(params, 1, [0] * (1 + row)) for row in range(ROWS)]
    proposals = [ProposalRequest(params, [0] * (1 + row), WIDTH, (row << 50,), 3) for row in range(ROWS)]
    return verifications, proposals, torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("policy", [{}, {"top_k": 5}, {"top_p": 0.9}, {"logprobs": 2}], ids=str)
def test_rows_without_a_grammar_have_the_bits_of_no_masks(rule: Rule, policy: dict) -> None:
    """Claim: a row whose mask has all bits set has the result of a call without masks, bit for bit, beside a row with
    few legal tokens; logprobs are those of the raw logits. Conclusive: equality of whole outputs."""
    verifications, proposals, logits = batch(rule, **policy)
    masks = torch.full((ROWS, word_count(WIDTH)), -1, dtype=torch.int32)
    masks[2], masks[2, 7] = 0, 0b1001
    plain, found = (verify(verifications, [1] * ROWS, logits, masks=one) for one in (None, masks))
    own, theirs = (propose(proposals, logits, one) for one in (None, masks))
    others = [0, 1, 3, 4, 5]
    assert [plain[row] for row in others] == [found[row] for row in others]
    assert [own[row] for row in others] == [theirs[row] for row in others]
    assert {*found[2].recovered_token_ids, *(token_id for token_id, _ in theirs[2].guesses)} <= {224, 227}
    if "logprobs" in policy:
        raw = logits[2].double().log_softmax(0)
        assert found[2].recovered_logprobs[0].logprob == pytest.approx(
            float(raw[found[2].recovered_token_ids[0]]), abs=1e-12
        )
        assert found[2].recovered_logprobs[0].top_token_ids == tuple(logits[2].topk(2).indices.tolist())


def test_masks_of_another_shape_are_refused() -> None:
    """Claim: masks of fewer rows or bits than logits, or of another type, raise an error that says what is wanted."""
    verifications, proposals, logits = batch(Rule.GREEDY)
    words = word_count(WIDTH)
    for shape, dtype in (
        ((ROWS - 1, words), torch.int32),
        ((ROWS, words - 1), torch.int32),
        ((ROWS, words), torch.int64),
    ):
        masks = torch.full(shape, -1, dtype=dtype)
        wanted = rf"they must be torch.int32 \[{ROWS}, at least {words}\]"
        with pytest.raises(ValueError, match=wanted):
            verify(verifications, [1] * ROWS, logits, masks=masks)
        with pytest.raises(ValueError, match=wanted):
            propose(proposals, logits, masks)


class BonusRowNotMasked(Setting):
    """The row after the last draft token has no mask."""

    def masks(self, path: Path, tokens: Path) -> torch.Tensor:
        masks = super().masks(path, tokens)
        masks[-1] = -1
        return masks


class LeavesNotMasked(SiblingWorld):
    """The rows after tokens without children have no masks: a walk that ends there draws its bonus token from all."""

    def masks(self, path: Path, offer: Offer) -> torch.Tensor:
        masks = super().masks(path, offer)
        parents = offer.parents or range(len(offer.token_ids))
        for row in range(len(masks)):
            if row not in parents:
                masks[row] = -1
        return masks


class RowBefore(Setting):
    """Every row has the mask of the row before: that of the path without its last draft token."""

    def masks(self, path: Path, tokens: Path) -> torch.Tensor:
        return packed_masks(self.legal, [path + tokens[: max(0, end - 1)] for end in range(len(tokens) + 1)], SIZE)


class OfAnotherBranch(SiblingWorld):
    """Below the root each row has the mask of the sibling before or after it."""

    def masks(self, path: Path, offer: Offer) -> torch.Tensor:
        masks = super().masks(path, offer)
        return torch.cat([masks[:1], masks[1:].roll(1, 0)]) if offer.parents else masks


class InRowOrder(SiblingWorld):
    """The masks follow the draft tokens in row order, as if they were a chain: those of another branch too."""

    def masks(self, path: Path, offer: Offer) -> torch.Tensor:
        rows = range(len(offer.token_ids) + 1)
        return packed_masks(lambda own: legal_next(own), [path + offer.token_ids[:end] for end in rows], SIZE)


class IllegalDropped(Setting):
    """A drawn token is not sent where it is illegal."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        return [
            (share, Child(c.token_id, c.draft_probs, c.token_id in legal_next(path)))
            for share, c in super().children(path)
        ]


class IllegalSiblingDropped(SiblingWorld):
    """A drawn token is not offered where it is illegal; the legal ones beside it are."""

    def offer(self, path: Path, nodes: dict) -> Offer:
        drawn, probs = nodes[path]
        kept = tuple(token_id for token_id in drawn if token_id in legal(path))
        return Offer(kept, (0,) * len(kept) if len(kept) > 1 else (), (probs,) * len(kept), ())


class MaskedAfterItDrew(Setting):
    """The draft draws from all tokens, and sends its distribution over the legal ones: a draw of another is repeated as
    the likeliest legal token."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        found = []
        for share, c in super().children(path):
            weight_of = dict(zip(c.draft_probs.token_ids, c.draft_probs.weights))
            kept = {token_id: weight for token_id, weight in weight_of.items() if token_id in legal_next(path)}
            if kept:
                token_id = c.token_id if c.token_id in kept else max(kept, key=kept.__getitem__)
                found.append((share, Child(token_id, DraftProbs(tuple(kept), tuple(kept.values())))))
        return found


def masked_at_the_end(make: Callable[..., World]) -> Callable[[pytest.MonkeyPatch], World]:
    """Masks are applied to the distribution after temperature and top_k, where some token remains."""

    def mutate(monkeypatch: pytest.MonkeyPatch) -> World:
        real, held = verification_module.sampled_distribution, []

        def kept(logits, masks):
            held.append(masks)
            return masked(logits, torch.full_like(masks, -1))

        def sampled(*arguments):
            supports = real(*arguments)
            for support in supports:
                width = arguments[0].shape[1]
                dense = torch.full((len(support.rows), width), -math.inf, dtype=torch.float64)
                ids = support.ids.expand(support.scores.shape)
                for row in range(len(dense)):
                    inside = support.scores[row] > -math.inf
                    dense[row, ids[row][inside]] = support.scores[row][inside]
                legal_scores, _ = masked(dense, held[-1][support.rows])
                support.scores.copy_(legal_scores.gather(1, ids).masked_fill(support.scores == -math.inf, -math.inf))
            return supports

        monkeypatch.setattr(verification_module, "masked", kept)
        monkeypatch.setattr(verification_module, "sampled_distribution", sampled)
        return make(top_k=2)

    return mutate


MUTATIONS: dict[str, Callable[[pytest.MonkeyPatch], World]] = {
    "mask missing on the bonus row": lambda patch: chain(kind=BonusRowNotMasked),
    "mask missing on the bonus row of a tree": lambda patch: tree(kind=LeavesNotMasked),
    "mask of the row before": lambda patch: chain(kind=RowBefore),
    "mask of another branch": lambda patch: tree(kind=OfAnotherBranch),
    "masks in row order": lambda patch: tree(kind=InRowOrder),
    "drawn token dropped because it is illegal": lambda patch: chain(kind=IllegalDropped, is_draft_masked=False),
    "drawn sibling dropped because it is illegal": lambda patch: tree(
        kind=IllegalSiblingDropped, is_draft_masked=False
    ),
    "draft masked after it drew": lambda patch: chain(kind=MaskedAfterItDrew, is_draft_masked=False),
    "masked after temperature and top_k": masked_at_the_end(chain),
    "masked after temperature and top_k, in a tree": masked_at_the_end(tree),
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_every_mutation_is_noticed(mutate: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the check finds each of these mistakes: a verdict with other breakpoints, or another distribution.
    Conclusive: it is the same check on the same functions; without the mistake it passes (tests above)."""
    own = mutate(monkeypatch)
    with pytest.raises(AssertionError):
        if isinstance(own, Setting):
            assert {path: share for path, share in output_distribution(own, 2).items() if share} == (
                target_output_distribution(own, 2)
            )
        else:
            check(own, 2)
