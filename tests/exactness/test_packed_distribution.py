"""Packed targets and drafts, of three tokens each: REJECTION keeps the distribution of the packed target.

As in `test_exact_distribution.py` and `test_siblings.py`, but the logits are those of the engine for packed weights
(`engine_worlds.py`), which are multiplied packed where the format is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path as Folder
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from specdec.engine.cpu.kernels import kernels
from tests.exactness.engine_worlds import Chains, Stepper, Trees, whole
from tests.exactness.enumeration import Child, Path, Setting, Table, base_two_distribution
from tests.exactness.exactness import check_exactness, committed_count_distribution
from tests.exactness.test_exact_distribution import varying_length
from tests.support.awq_gptq_folders import LAYOUTS
from tests.support.engine_models import OUTPUT_PADDING, make_tiny_model
from tests.support.gguf_models import WIDE
from tests.support.packed_pairs import FORMATS, GGUF, write_format

SIZE = 3
PROMPT = (1, 0, 2, 0, 1)
SEEDS = {"target": 3, "draft": 4}
USUAL = ("Q4_0", "w4-groups", "int8-rows")  # of 4 bits and of 8
DENSE = "dense"
POLICIES: dict[str, dict[str, object]] = {"plain": {}, "penalties and top_k": {"presence_penalty": 2.0, "top_k": 2}}

Load = Callable[..., Stepper]


def write_dense(folder: Folder, kind: str, seed: int, **sizes: object) -> Folder:
    """Writes a model of three tokens, whose tokenizer has a merge, as that of a GGUF file must."""
    written = make_tiny_model(folder, kind, seed, vocab_size=SIZE + OUTPUT_PADDING, **{**sizes, "num_hidden_layers": 2})
    Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(written / "tokenizer.json"))
    return written


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Returns a model in a format, or the dense one of which that was made, by its part in a pair."""
    known: dict[tuple[str, str, bool], Stepper] = {}

    def loaded(name: str, part: str, is_dense: bool = False) -> Stepper:
        if (name, part, is_dense) not in known:
            folder = tmp_path_factory.mktemp(part)
            sizes = WIDE if name in GGUF else {"intermediate_size": 160}
            kind = LAYOUTS[name].kind if name in LAYOUTS else "llama"
            dense = write_dense(folder / DENSE, kind, SEEDS[part], **sizes)
            known[name, part, True] = Stepper(dense)
            known[name, part, False] = Stepper(write_format(dense, folder / "packed", name))
        return known[name, part, is_dense]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield loaded


@dataclass(kw_only=True)
class SameBits(Chains):
    """The rows of a verification must have the bits of plain decoding, before they are rounded."""

    def lines(self, path: Path, tokens: Path) -> list[tuple[int, ...]]:
        rows = self.stepper.verified(path, tokens)
        assert torch.equal(rows, torch.stack([self.stepper.alone(path + tokens[:end]) for end in range(len(rows))]))
        return list(map(whole, rows))


def world(kind: Callable[..., Any], target: Stepper, draft: Stepper, policy: str = "plain", **shape: object) -> Any:
    """A world of a pair; `shape`: further fields of it."""
    facts: dict[str, object] = {
        "params": base_two_distribution(prompt_length=len(PROMPT), **POLICIES[policy]),
        "target": lambda path: whole(target.alone(path)),
        "draft": lambda path: tuple(draft.alone(path).tolist()),
        "prompt": PROMPT,
        "stepper": target,
    }
    return kind(**facts | shape)


def formats(usual: tuple[str, ...]) -> list[Any]:
    """All formats, those that are not usual with the longer tests."""
    return [pytest.param(name, marks=[pytest.mark.more] * (name not in usual)) for name in FORMATS]


@pytest.mark.parametrize("policy", ["plain", pytest.param("penalties and top_k", marks=pytest.mark.more)])
@pytest.mark.parametrize("name", formats(USUAL))
def test_output_has_the_distribution_of_the_packed_target(name: str, policy: str, load: Load) -> None:
    """Claim: the joint distribution of the first three tokens, over several rounds with chains of 0 to 2 draft tokens
    of a packed draft, is that of the packed target decoded token by token. Source: Leviathan et al. 2023, theorem 1.
    Conclusive: fractions over every cell of every draw, without tolerance; the rows are those of the engine's own
    steps and have the bits of plain decoding."""
    check_exactness(world(SameBits, load(name, "target"), load(name, "draft"), policy, draft_length=varying_length))


@pytest.mark.parametrize("packed", SEEDS)
@pytest.mark.parametrize("name", formats(("Q4_0",)))
def test_one_of_a_pair_may_be_packed(name: str, packed: str, load: Load) -> None:
    """Claim: the same with one packed model and one dense one. Conclusive: as above."""
    pair = (load(name, part, is_dense=part != packed) for part in SEEDS)
    check_exactness(world(SameBits, *pair, draft_length=varying_length))


@pytest.mark.parametrize("name", formats(("w4-groups",)))
def test_trees_have_the_distribution_of_the_packed_target(name: str, load: Load) -> None:
    """Claim: the same for the first two tokens and trees of two drawn siblings a node. Conclusive: as above; a step has
    all nodes of a tree."""
    own = world(Trees, load(name, "target"), load(name, "draft"), depth=1, row_max=3)
    assert own.output(2) == own.wanted(2)


@pytest.mark.parametrize("name", USUAL)
def test_the_worlds_are_not_trivial(name: str, load: Load) -> None:
    """Claim: the checks above mean something: weights are multiplied packed, rounds of every length occur, and the
    target's distribution depends on its output. Conclusive: bytes of the products, and fractions."""
    target = load(name, "target")
    if kernels() is not None:
        assert target.driver.model.product_bytes < load(name, "target", is_dense=True).driver.model.product_bytes / 3
    own = world(Chains, target, load(name, "draft"), draft_length=lambda path: 2)
    counts = committed_count_distribution(own)
    assert set(counts) == {1, 2, 3} and all(share > Fraction(1, 50) for share in counts.values())
    outputs = [own.target_distribution(PROMPT + more) for more in ((), *itertools.product(range(SIZE), repeat=2))]
    assert len(set(outputs)) >= 4


@dataclass(kw_only=True)
class Undeclared(Chains):
    """The draft draws with other weights than those of the distribution that it declares."""

    drawn: Table

    def children(self, path: Path) -> list[tuple[Fraction, Child]]:
        honest = replace(self, draft=self.drawn, cache={})
        shares = {child.token_id: share for share, child in Setting.children(honest, path)}
        declared = [child for _, child in super().children(path)]
        assert shares.keys() == {child.token_id for child in declared}
        return [(shares[child.token_id], child) for child in declared]


@pytest.mark.parametrize("name", ["Q4_0", "w4-groups"])
def test_mistakes_are_noticed(name: str, load: Load) -> None:
    """Claim: the check finds a target that is not the packed one but the one of which it was made, and a draft that
    declares the distribution of its packed weights and draws with the dense ones. Conclusive: the same check, with that
    one mistake."""
    target, draft = load(name, "target"), load(name, "draft")
    dense, dense_draft = (load(name, part, is_dense=True) for part in SEEDS)
    shape = {"draft_length": varying_length}
    other_target = replace(world(Chains, target, draft, **shape), target=lambda path: whole(dense.alone(path)))
    undeclared = world(Undeclared, target, draft, drawn=lambda path: tuple(dense_draft.alone(path).tolist()), **shape)
    for own in (other_target, undeclared):
        with pytest.raises(AssertionError, match="does not have the target distribution|has a breakpoint"):
            check_exactness(own)
