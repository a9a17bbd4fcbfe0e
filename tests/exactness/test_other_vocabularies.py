"""A draft that has not all of its target's tokens keeps the target distribution exactly; mistakes of its map do not."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from specdec.decoding import verification as verification_module
from specdec.engine.retokenizer import Reading, Retokenizer
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.protocol.types import DraftProbs
from tests.exactness.enumeration import PROMPT, Child, Path, Setting, base_two_distribution
from tests.exactness.exactness import check_exactness, output_distribution, target_output_distribution
from tests.exactness.siblings import SiblingWorld
from tests.exactness.test_exact_distribution import POLICIES

SIZE = 3
MAPS = {"a part": [0, 2], "in another order": [2, 1, 0], "a part in another order": [2, 0], "one token": [1]}


def target_table(path: Path) -> tuple[int, ...]:
    """Logits of all three tokens, none of them rare."""
    return tuple((5 * t + 3 * sum(path) + 2 * len(path) + path[-1]) % 7 // 2 for t in range(SIZE))


# Strings of a target and of a draft with another tokenizer, by id, as byte-level tokenizers write them: "\u00c3" and
# "\u00a9" are the two bytes of one character. The third has a part of its own tokenizer's tokens, those at these ids.
TOKENIZERS = {
    "another tokenizer": (("a", "b", "ab"), ("<unk>", "c", "b", "a"), None),
    "another tokenizer with all": (("a", "b", "ab"), ("<unk>", "ab", "b", "a"), None),
    "a part of another tokenizer": (("a", "b", "ab"), ("<unk>", "c", "b", "a"), [3, 2]),
    "another tokenizer with one": (("a", "b", "ab"), ("<unk>", "a", "c"), None),
    "characters that tokens cut": (("a", "\u00c3", "\u00a9"), ("<unk>", "\u00c3\u00a9", "a"), None),
}
NAMES = [*MAPS, *TOKENIZERS]


@dataclass(frozen=True)
class Known:
    """A map, and the width of the draft's output layer."""

    map: VocabularyMap
    width: int

    def logits(self, path: Path) -> tuple[float, ...]:
        """Logits of a draft that reads a path in its own tokens, spread by the map as its service does."""
        tokens: Sequence[int] = path
        if self.map.retokenizer is not None:
            reading = Reading(self.map.retokenizer)
            reading.read(PROMPT)
            reading.read(path)
            tokens = reading.tokens
        own = self.map.own(torch.tensor(tokens)).tolist()
        rows = torch.tensor([[(3 * t + len(own) + 2 * own[-1] + sum(own)) % 5 // 2 for t in range(self.width)]])
        return tuple(self.map.spread(rows.float()[:, self.map.columns])[0].tolist())


def by_strings(folder: pathlib.Path, target: Sequence[str], draft: Sequence[str], part: list[int] | None) -> Known:
    """The map of a draft with another tokenizer, from files of both."""
    words = (
        models.BPE(vocab={string: token_id for token_id, string in enumerate(target)}, merges=[]),
        models.Unigram([(string, -1.0) for string in draft], unk_id=0),
    )
    files = folder / "target.json", folder / "draft.json"
    for model, file in zip(words, files):
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.save(str(file))
    fewer = None if part is None else VocabularyMap(torch.tensor(part), len(draft))
    width = len(draft) if part is None else len(part) + 1
    return Known(VocabularyMap.by_strings(Retokenizer(*files, (), ()), width, fewer), width)


@pytest.fixture(scope="module")
def maps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Known]:
    own = {name: Known(VocabularyMap(torch.tensor(ids), SIZE), len(ids)) for name, ids in MAPS.items()}
    return own | {name: by_strings(tmp_path_factory.mktemp("pair"), *pair) for name, pair in TOKENIZERS.items()}


def world(known: Known, kind: type[Setting] = Setting, **policy: object) -> Setting:
    return kind(base_two_distribution(**policy), target_table, known.logits, lambda path: 2)


@pytest.mark.parametrize("name", NAMES)
def test_the_output_has_the_target_distribution(name: str, maps: dict[str, Known]) -> None:
    """Claim: with two draft tokens and one kept, the first three tokens have the target's joint distribution, for a
    draft with some of the tokens, in another order, or those of another tokenizer. Conclusive: fractions, every draw,
    no tolerance; the map, the reading, the proposals, the tree and the rule are the real ones."""
    check_exactness(world(maps[name]))


@pytest.mark.parametrize("policy", list(POLICIES)[1:])
def test_policies_keep_it_with_another_tokenizer(policy: str, maps: dict[str, Known]) -> None:
    """The same with penalties, top_k, top_p and min_tokens, over tokens of which the draft lacks one."""
    check_exactness(world(maps["another tokenizer"], **POLICIES[policy]))


@pytest.mark.parametrize("name", ["a part in another order", "another tokenizer", "another tokenizer with all"])
def test_siblings_keep_it(name: str, maps: dict[str, Known]) -> None:
    """The same for trees of two children a node, drawn without replacement, over the first two tokens."""
    own = SiblingWorld(base_two_distribution(), target_table, maps[name].logits)
    assert own.output(2) == own.wanted(2)


def test_the_maps_are_those_of_the_strings(maps: dict[str, Known]) -> None:
    """The worlds mean something: by hand, a token of the target is the draft's of the same string, any other is read as
    text, a character once it is whole; and a token that the draft never proposes is a good part of the output."""

    def read(name: str, *path: int) -> list[int]:
        map_ = maps[name].map
        assert map_.retokenizer is not None
        reading = Reading(map_.retokenizer)
        reading.read(path[:1])
        reading.read(path)
        return [int(own) for own in map_.own(torch.tensor(reading.tokens))]

    common = {name: [logit > -math.inf for logit in maps[name].logits((0,))] for name in TOKENIZERS}
    one = [True, False, False]
    assert list(common.values()) == [[True, True, False], [True] * 3, [True, True, False], one, one]
    assert read("another tokenizer", 0, 1, 2) == [3, 2, 3, 2]
    assert read("another tokenizer with all", 0, 1, 2) == [3, 2, 1]
    assert read("a part of another tokenizer", 0, 1, 2) == [0, 1, 0, 1]
    assert read("another tokenizer with one", 0, 1) == [1, 0]
    cut = "characters that tokens cut"
    assert read(cut, 0, 1) == [2] and read(cut, 0, 1, 2) == [2, 1] and read(cut, 0, 1, 0) == [2, 0, 2]
    for name, stranger in (("a part", 1), ("another tokenizer", 2)):
        found = output_distribution(world(maps[name]), 1)
        assert Fraction(1, 10) < found[stranger,] < Fraction(9, 10)


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


@pytest.mark.parametrize("name", ["a part in another order", "another tokenizer"])
@pytest.mark.parametrize("kind", MISTAKES)
def test_a_mistake_of_the_map_is_noticed(kind: type[Setting], name: str, maps: dict[str, Known]) -> None:
    """Claim: each changes the distribution of the output itself. Conclusive: the same enumeration without it agrees."""
    mistaken = world(maps[name], kind)
    assert output_distribution(mistaken, 2) != target_output_distribution(mistaken, 2)


def test_a_residual_over_common_tokens_only_is_noticed(monkeypatch: pytest.MonkeyPatch, maps: dict[str, Known]) -> None:
    """The same for the sampler: recovered tokens drawn from the tokens of the draft distribution."""
    real = verification_module.residual

    def common(target, lines, columns, probs):
        target = target.clone()
        target[:, 1] = 0.0
        return real(target, lines, columns, probs)

    monkeypatch.setattr(verification_module, "residual", common)
    with pytest.raises(AssertionError):
        check_exactness(world(maps["a part in another order"]))
