"""A draft that has not all of its target's tokens keeps the target distribution exactly; mistakes of its map do not."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from specdec.decoding import verification as verification_module
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.protocol.types import DraftProbs
from tests.exactness.enumeration import Child, Path, Setting, base_two_distribution
from tests.exactness.exactness import check_exactness, output_distribution, target_output_distribution

SIZE = 3
MAPS = {"a part": [0, 2], "in another order": [2, 1, 0], "a part in another order": [2, 0], "one token": [1]}


def target_table(path: Path) -> tuple[int, ...]:
    """Logits of all three tokens, none of them rare."""
    return tuple((5 * t + 3 * sum(path) + 2 * len(path) + path[-1]) % 7 // 2 for t in range(SIZE))


def draft_table(target_token_ids: list[int]) -> Callable[[Path], tuple[float, ...]]:
    """Logits of a draft that reads a path in its own ids, one more for what it does not have, spread by the map."""
    known = VocabularyMap(torch.tensor(target_token_ids), SIZE)

    def logits(path: Path) -> tuple[float, ...]:
        own = known.own(torch.tensor(path)).tolist()
        rows = torch.tensor([[(3 * t + len(own) + 2 * own[-1] + sum(own)) % 5 // 2 for t in range(known.own_size)]])
        return tuple(known.spread(rows.float())[0].tolist())

    return logits


def world(kind: type[Setting] = Setting, target_token_ids: list[int] = MAPS["a part in another order"]) -> Setting:
    return kind(base_two_distribution(), target_table, draft_table(target_token_ids), lambda path: 2)


@pytest.mark.parametrize("target_token_ids", MAPS.values(), ids=MAPS)
def test_the_output_has_the_target_distribution(target_token_ids: list[int]) -> None:
    """Claim: with two draft tokens and one kept, the first three tokens have the target's joint distribution, for a
    draft with some of the tokens, in another order. Conclusive: fractions, every draw, no tolerance; the map, the
    proposals, the tree and the rule are the real ones."""
    check_exactness(world(target_token_ids=target_token_ids))


def test_tokens_unknown_to_the_draft_are_written_all_the_same() -> None:
    """The worlds mean something: a token that the draft never proposes is a good part of the output."""
    found = output_distribution(world(target_token_ids=[0, 2]), 1)
    assert Fraction(1, 10) < found[1,] < Fraction(9, 10)


class UnknownBecomesKnown(Setting):
    """The draft draws among its own tokens and a stranger, sends the first known token for the stranger, and states the
    distribution of the known ones."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        known = super().children(path)
        first, *others = [(share * Fraction(2, 3), child) for share, child in known]
        return [(first[0] + Fraction(1, 3), first[1]), *others]


class StatedInItsOwnOrder(Setting):
    """Tokens are translated and their distribution is not."""

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        known = super().children(path)
        rows = [child.draft_probs for _, child in known]
        turned = [DraftProbs(row.token_ids, row.weights[::-1]) for row in rows]
        return [(share, Child(child.token_id, row)) for (share, child), row in zip(known, turned)]


class OnlyCommonTokens(Setting):
    """A rejected token is replaced by one that the draft has too."""

    def verdicts(self, path: Path, tokens: Path, rows: tuple[DraftProbs, ...]) -> list[tuple[Fraction, Path]]:
        known = [token for token, logit in enumerate(self.draft(path)) if logit > float("-inf")]
        real = super().verdicts(path, tokens, rows)
        return [(share, (*done[:-1], done[-1] if done[-1] in known else known[0])) for share, done in real]


MISTAKES = [UnknownBecomesKnown, StatedInItsOwnOrder, OnlyCommonTokens]


@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_of_the_map_is_noticed(kind: type[Setting]) -> None:
    """Claim: each changes the distribution of the output itself. Conclusive: the same enumeration without it agrees."""
    mistaken = world(kind)
    assert output_distribution(mistaken, 2) != target_output_distribution(mistaken, 2)


def test_a_residual_over_common_tokens_only_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the sampler: recovered tokens drawn from the tokens of the draft distribution."""
    real = verification_module.residual

    def common(target, lines, columns, probs):
        target = target.clone()
        target[:, 1] = 0.0
        return real(target, lines, columns, probs)

    monkeypatch.setattr(verification_module, "residual", common)
    with pytest.raises(AssertionError):
        check_exactness(world())
