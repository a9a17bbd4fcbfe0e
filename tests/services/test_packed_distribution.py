"""The distribution of the text under REJECTION with packed weights, through the running services.

The packed target's distribution after every prefix of a text is known from plain forward passes of the engine, with the
whole vocabulary. So each token becomes a number: the probability of the tokens before it in an order, and a uniform
share of its own. These numbers are uniform and independent if and only if the tokens were drawn from that distribution
(Rosenblatt, 1952), which a chi-square test judges, with the limit of `test_distribution.py`. The order, chosen from the
prefix, is that by the ratio to another distribution, so that tokens of that one gather at one end.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.exactness.statistics import uniformity_p
from tests.services.test_distribution import P_LIMIT
from tests.support.engine_models import Driver
from tests.support.packed_pairs import write_format
from tests.support.services import MODELS, Client, Outcome, fixed, running
from tests.support.unlawful_draft import lying

PROMPT = [532, 279, 307, 1040, 8]  # `for i in range(`
TOKENS_EACH = 160
# They wait for the draft, so that most tokens are tested: chains, a tree, drawn siblings, other proposers beside them.
WAIT = {"draft_wait_ms": 10_000}
TREE = {"draft_window": 8, "draft_nodes_per_step": 4, **WAIT}
PROPOSERS = ["PROPOSER_DRAFT", "PROPOSER_NGRAM", "PROPOSER_SUFFIX"]
WAYS = (
    fixed(1, **WAIT),
    fixed(4, **WAIT),
    fixed(4, **TREE),
    fixed(8, **TREE, draft_siblings=2),
    fixed(8, **TREE, draft_siblings=2, proposers=PROPOSERS),
)
TEXTS_OF_A_WAY, TRIES_MAX = 6, 5
CELL_COUNT = 8
BIAS = 0.15

Probs = list[torch.Tensor]  # of each text, [tokens, vocab] float64


# By name: the formats of a target and a draft, "" for the shipped weights, and the target's ranks.
PAIRS = {
    "4 bits, GGUF, with a draft of 8 bits": ("Q4_0", "Q8_0", 1),
    "4 bits with a dense draft": ("w4-groups", "", 1),
    "8 bits with a draft of 4 bits": ("int8-rows", "w4-groups", 1),
    "8 bits with a dense draft, two ranks": ("int8-rows", "", 2),
    "dense with a draft of 4 bits": ("", "w4-groups", 1),
}
USUAL = ("4 bits, GGUF, with a draft of 8 bits", "8 bits with a draft of 4 bits")


def write_pair(target: str, draft: str, folder: Path) -> tuple[Path, Path]:
    """Writes a pair in two formats and returns its paths."""
    made = [
        write_format(MODELS / part, folder / part, name) if name else MODELS / part
        for part, name in (("target", target), ("draft", draft))
    ]
    return made[0], made[1]


def texts_of(client: Client, ways: Sequence[dict]) -> tuple[list[list[int]], float]:
    """Draws texts in these ways, again until the draft was there for many tokens, as a draft that starts on a busy
    machine is not waited for; returns all their tokens and the accepted share of the draft's."""
    asked = {"prompt": PROMPT, "max_tokens": TOKENS_EACH, "ignore_eos": True, "temperature": 1.0}
    requests = [{**asked, "speculative": {**way, "rule": "RULE_REJECTION"}} for way in ways]
    outcomes: list[Outcome] = []
    for _ in range(TRIES_MAX):
        outcomes += client.generate_all(requests, width=16)
        used = [outcome.finished.statistics for outcome in outcomes]
        drafted = sum(own.num_model_draft_tokens for own in used)
        if drafted > TOKENS_EACH * len(ways) / 2:
            accepted = sum(own.num_model_accepted_tokens for own in used)
            return [outcome.token_ids for outcome in outcomes], accepted / drafted
    raise AssertionError(f"{drafted} draft tokens in {len(outcomes)} texts")


def probs_of(model: Path, texts: Sequence[list[int]]) -> Probs:
    """The model's distribution of each token of the texts, by one plain forward pass for each text."""
    driver, found = Driver.load(model), []
    for tokens in texts:
        table = driver.open(len(PROMPT) + len(tokens))
        logits = driver.feed(table, [*PROMPT, *tokens[:-1]], len(tokens))
        driver.cache.release(table)
        found.append(logits.double().softmax(-1))
    return found


def p_value(texts: Sequence[list[int]], claimed: Probs, other: Probs) -> float:
    """The p-value that the texts were drawn from `claimed`, ordered by the ratio to `other`."""
    generator, places = torch.Generator().manual_seed(1), []
    for tokens, own, another in zip(texts, claimed, other):
        token_ids = torch.tensor(tokens)[:, None]
        ratios = another / own
        is_before = ratios < ratios.gather(1, token_ids)
        is_beside = ratios == ratios.gather(1, token_ids)
        share = torch.rand(len(tokens), generator=generator, dtype=torch.float64)
        places.append((own * is_before).sum(1) + share * (own * is_beside).sum(1))
    return uniformity_p((torch.cat(places) * CELL_COUNT).long().clamp(max=CELL_COUNT - 1), CELL_COUNT)


def mixed(target: Probs, draft: Probs) -> Probs:
    """The target's distribution with a share of the draft's."""
    return [(1 - BIAS) * own + BIAS * other for own, other in zip(target, draft)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.more if name in USUAL else pytest.mark.slow) for name in PAIRS]
)
def test_the_output_distribution_is_the_packed_targets(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: in all ways to speculate texts have the distribution of the packed target, whatever the draft's weights
    are. Source: exactness is that of the packed model. Conclusive: 4,800 tokens or more; the same statistic on the same
    sample rejects a mixture with 15 % of the draft's distribution, and of a target of 4 bits also the distribution of
    the weights of which it was made, whose text differs by the rounding alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target_format, draft_format, rank_count = PAIRS[name]
    target, draft = write_pair(target_format, draft_format, tmp_path)
    own = {"tensor_parallel_size": str(rank_count)}
    with running(target, draft, threads=1, dtype="float32", target=own) as services:
        texts, accepted = texts_of(services.client, WAYS * TEXTS_OF_A_WAY)
    assert 0.05 < accepted < 0.95
    packed, dense, drafted = (probs_of(model, texts) for model in (target, MODELS / "target", draft))
    assert min(p_value(texts, packed, other) for other in (drafted, dense)) > P_LIMIT
    assert p_value(texts, mixed(packed, drafted), packed) < P_LIMIT
    assert target_format != "Q4_0" or p_value(texts, dense, packed) < P_LIMIT


@pytest.mark.more
def test_an_undeclared_distribution_is_noticed(tmp_path: Path) -> None:
    """Claim: the test above finds a packed draft that draws from another distribution than it declares. Conclusive: a
    real draft process with that one fault, of a pair whose honest draft passes above."""
    target, draft = write_pair("int8-rows", "w4-groups", tmp_path)
    with running(target, draft, threads=1, dtype="float32") as services:
        with lying("flat", draft, target) as address, services.coordinator_with(draft=(address,)) as client:
            texts, _ = texts_of(client, [fixed(4, **WAIT)] * TEXTS_OF_A_WAY * len(WAYS))
    assert p_value(texts, probs_of(target, texts), probs_of(draft, texts)) < P_LIMIT
