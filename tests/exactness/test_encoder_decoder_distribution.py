"""An encoder-decoder target and its draft, of three tokens each: every rule keeps the target distribution.

As in `test_exact_distribution.py` and `test_siblings.py`, but the logits are those of the engine for T5 folders
(`engine_worlds.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path as Folder

import pytest
from tokenizers import Tokenizer, models

from specdec.decoding.verification import VerificationRequest, verify
from specdec.protocol.offer import Offer
from specdec.protocol.rejection import decide
from specdec.protocol.tree_shape import check_shape
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.exactness.engine_worlds import Chains, Stepper, Trees, whole
from tests.exactness.enumeration import Path, Setting, base_two_distribution
from tests.exactness.exactness import check_exactness, committed_count_distribution
from tests.exactness.test_exact_distribution import varying_length
from tests.support.encoder_decoder_models import make_encoder_decoder
from tests.support.engine_models import OUTPUT_PADDING

SIZE, START = 3, 2
INPUT = (1, 0, 2, 2, 1, 1, 0)
PROMPT = (*INPUT, START)
OTHER_INPUT = (0, 0, 1, 2, 0, 1, 2)
TEXT_LENGTH = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Folder]:
    """A target's folder and a draft's."""
    made = []
    for kind, seed in (("t5-gated", 11), ("t5", 1)):  # each token is the likeliest somewhere
        sizes = {"vocab_size": SIZE + OUTPUT_PADDING, "decoder_start_token_id": START}
        made.append(make_encoder_decoder(tmp_path_factory.mktemp(kind) / "model", kind, seed, **sizes))
        Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, [])).save(str(made[-1] / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def steppers(folders: list[Folder]) -> list[Stepper]:
    return [Stepper(folder, len(INPUT), INPUT) for folder in folders]


World = Chains | Trees


@pytest.fixture(scope="module")
def world(steppers: list[Stepper]) -> Callable[..., World]:
    """Makes a world of the pair; `changes` are fields of it."""
    target, draft = steppers

    def make(kind: type[World], policy: dict[str, object], **changes: object) -> World:
        facts: dict[str, object] = {
            "params": base_two_distribution(prompt_length=len(PROMPT), encoder_length=len(INPUT), **policy),
            "target": lambda path: whole(target.alone(path)),
            "draft": lambda path: tuple(draft.alone(path).tolist()),
            "prompt": PROMPT,
            "stepper": target,
        }
        return kind(**facts | changes)

    return make


POLICIES = {
    "plain": {},
    "repetition penalty": {"repetition_penalty": 2.0},
    "all penalties": {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    "min_tokens and top_k": {"min_tokens": 2, "stop_token_ids": (1,), "top_k": 2},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_output_has_the_target_distribution(world: Callable[..., World], policy: dict[str, object]) -> None:
    """Claim: the joint distribution of the first three tokens, over several rounds with chains of 0 to 2 draft tokens,
    is that of the target decoded token by token; penalties count beginning and output, not the input, and minimum and
    stops the output. Source: Leviathan et al. 2023, theorem 1, whose first target was a T5. Conclusive: fractions over
    every cell of every draw, without tolerance; the rows are those of the engine's own steps."""
    check_exactness(world(Chains, policy, draft_length=varying_length))


LONGER = [pytest.mark.more, pytest.mark.lengthy]


@pytest.mark.parametrize(
    "policy, depth, count",
    [
        ("plain", 1, 2),
        ("all penalties", 1, 2),
        pytest.param("all penalties", 2, 1, marks=LONGER),
        pytest.param("plain", 2, 2, marks=LONGER),
    ],
)
def test_trees_have_the_target_distribution(world: Callable[..., World], policy: str, depth: int, count: int) -> None:
    """Claim: the same for the first tokens and trees of two drawn siblings a node, of up to three nodes. Conclusive: as
    above; a step has all nodes of a tree."""
    own = world(Trees, POLICIES[policy], depth=depth, row_max=3)
    assert own.output(count) == own.wanted(count)


def texts_of(stepper: Stepper, params: ResolvedSamplingParams) -> Path:
    """The output of TEXT_LENGTH tokens without speculation."""
    path = PROMPT
    while len(path) < len(PROMPT) + TEXT_LENGTH:
        (output,) = verify([VerificationRequest(params, 0, path)], [1], stepper.alone(path)[None])
        path += output.recovered_token_ids[:1]
    return path


def all_trees() -> list[tuple[Path, Path]]:
    """Draft tokens and parents: every chain of up to two tokens, and the tree of all of them."""
    chains = [chain for length in range(3) for chain in itertools.product(range(SIZE), repeat=length)]
    nodes = sorted(chains)  # depth first, the root before all others
    whole_tree = tuple(node[-1] for node in nodes[1:]), tuple(nodes.index(node[:-1]) for node in nodes[1:])
    check_shape(*reversed(whole_tree))
    return [(chain, ()) for chain in chains] + [whole_tree]


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.COUPLED])
def test_whatever_is_drafted_the_text_is_the_same(steppers: list[Stepper], rule: Rule) -> None:
    """Claim: under GREEDY and COUPLED every verification commits the tokens of plain decoding, and one more than the
    draft has right. Conclusive: all chains of up to two draft tokens, and the tree of all of them, at every token of
    texts with and without penalties, with the engine's unrounded logits; texts of several seeds differ."""
    found = set()
    for seed, penalty in itertools.product(range(8 if rule is Rule.COUPLED else 1), (1.0, 1.7)):
        temperature = 2.0 if rule is Rule.COUPLED else 0.0
        own = {"temperature": temperature, "encoder_length": len(INPUT), "repetition_penalty": penalty}
        params = ResolvedSamplingParams(rule, seed, len(PROMPT), **own)
        text = texts_of(steppers[0], params)
        found.add(text)
        for end, (tokens, parents) in itertools.product(range(len(PROMPT), len(text) - 2), all_trees()):
            path, rest = text[:end], text[end:]
            request = VerificationRequest(params, 0, path, tokens, parents=parents)
            logits = steppers[0].verified(path, tokens, parents)
            (output,) = verify([request], [len(logits)], logits)
            verdict = decide(rule, tokens, (), output, (), parents)
            committed = (*(tokens[index] for index in verdict.accepted), verdict.next_token_id)
            right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(tokens, rest)))
            assert committed == rest[: (2 if parents else right) + 1], (seed, penalty, end, tokens)
    assert len(found) > (5 if rule is Rule.COUPLED else 0)


def test_the_world_is_not_trivial(world: Callable[..., World]) -> None:
    """Claim: the checks above mean something: rounds of every length occur, and the target's distribution depends on
    its output. Conclusive: in fractions."""
    own = world(Chains, {}, draft_length=lambda path: 2)
    counts = committed_count_distribution(own)
    assert set(counts) == {1, 2, 3} and all(share > Fraction(1, 50) for share in counts.values())
    outputs = [own.target_distribution(PROMPT + more) for more in ((), *itertools.product(range(SIZE), repeat=2))]
    assert len(set(outputs)) >= 4


@dataclass(kw_only=True)
class InputCounted(Chains):
    """The sampler counts the tokens of the input too: `params` says that there is none."""

    def target_distribution(self, path: Path) -> tuple[Fraction, ...]:
        right = replace(self, params=replace(self.params, encoder_length=len(INPUT)))
        return Setting.target_distribution(right, path)


@dataclass(kw_only=True)
class SiblingsSeen(Trees):
    """The nodes of a tree are run as a chain: each sees those before it."""

    def lines(self, path: Path, offer: Offer) -> list[tuple[int, ...]]:
        return list(map(whole, self.stepper.verified(path, offer.token_ids)))


def test_mistakes_are_noticed(world: Callable[..., World], folders: list[Folder]) -> None:
    """Claim: the checks find penalties of the input, an input of another session in cross attention, and siblings in
    self attention. Conclusive: the same checks, with that one mistake."""
    policy: dict[str, object] = {"repetition_penalty": 2.0}
    params = base_two_distribution(prompt_length=len(PROMPT), **policy)
    with pytest.raises(AssertionError):
        check_exactness(world(InputCounted, policy, params=params, draft_length=varying_length), 2)
    with pytest.raises(AssertionError):
        other = Stepper(folders[0], len(INPUT), OTHER_INPUT)
        check_exactness(world(Chains, {}, stepper=other, draft_length=varying_length), 2)
    with pytest.raises(AssertionError):
        seen = world(SiblingsSeen, {}, depth=2, row_max=3)
        assert seen.output(1) == seen.wanted(1)
