"""The distribution of the text under REJECTION, through the running services.

The target distribution is known exactly (a table by the last two tokens), the draft's is clearly different. Draft
lengths vary and include 0, a verification is a chain or a tree with siblings and guesses of other proposers, and waits
for the draft or not. The null
hypothesis is the target distribution; the limit on the p-value is fixed at 1e-6, and the seeds are the server's, so a
pass does not depend on a chosen seed and a failure is one run in a million.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from transformers import AutoModelForCausalLM

from specdec.engine.table_model import write_table_model
from tests.support.services import MODELS, SHAPES, Outcome, Services, fixed, running

VOCABULARY_SIZE = 4
P_LIMIT = 1e-6
TOKENS_EACH = 400
PROMPT = [1, 2]
TREES = SHAPES["siblings"], SHAPES["waiting siblings"], SHAPES["all proposers"], SHAPES["no draft"]
WAYS = (*map(fixed, range(5)), SHAPES["chain"], SHAPES["tree"], SHAPES["waiting tree"], SHAPES["auto"], *TREES)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("distribution")
    write_table_model(folder / "target", VOCABULARY_SIZE, seed=5)
    write_table_model(folder / "draft", VOCABULARY_SIZE, seed=6)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="module")
def services(models: tuple[Path, Path]):
    with running(*models, threads=1) as started:
        yield started


def distribution_of(model: Path) -> numpy.ndarray:
    """Returns the table's distribution: [before last, last, next] float64."""
    logits = load_file(model / "model.safetensors")["logits"].double()
    return torch.softmax(logits, -1).numpy()[:VOCABULARY_SIZE, :VOCABULARY_SIZE]


def transitions(outcomes: list[Outcome]) -> numpy.ndarray:
    """Returns counts over all outputs: [before last, last, next]."""
    counts = numpy.zeros((VOCABULARY_SIZE,) * 3)
    for outcome in outcomes:
        tokens = numpy.array([*PROMPT, *outcome.token_ids])
        numpy.add.at(counts, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    return counts


def p_value(counts: numpy.ndarray, probs: numpy.ndarray) -> float:
    """Returns the p-value of the chi-square test over all contexts together."""
    statistic, freedom = 0.0, 0
    for before in range(VOCABULARY_SIZE):
        for last in range(VOCABULARY_SIZE):
            expected = counts[before, last].sum() * probs[before, last]
            if expected.min() >= 5:
                statistic += ((counts[before, last] - expected) ** 2 / expected).sum()
                freedom += VOCABULARY_SIZE - 1
    return float(stats.chi2.sf(statistic, freedom))


def sample(services: Services, generation_count: int, ways: tuple = WAYS, **asked) -> list[Outcome]:
    requests = [
        {
            "prompt": PROMPT,
            "max_tokens": TOKENS_EACH,
            "ignore_eos": True,
            "speculative": {**ways[index % len(ways)], "rule": "RULE_REJECTION"},
            **asked,
        }
        for index in range(generation_count)
    ]
    return services.client.generate_all(requests, width=16)


@pytest.mark.parametrize(
    "generation_count, bias",
    [pytest.param(65, 0.08, marks=pytest.mark.more), pytest.param(260, 0.03, marks=pytest.mark.slow)],
)
def test_the_output_distribution_is_the_targets(
    generation_count: int, bias: float, services: Services, models: tuple[Path, Path]
):
    """n = 104,000 tokens, 26,000 in make test-more. A mixture with 3 % of the draft's distribution, or 8 %, is rejected
    by the same statistic on the same sample, so the test has the power to detect a bias towards the draft."""
    outcomes = sample(services, generation_count)
    counts = transitions(outcomes)
    assert counts.sum() >= TOKENS_EACH * generation_count
    drafted = sum(outcome.finished.statistics.num_draft_tokens for outcome in outcomes)
    accepted = sum(outcome.finished.statistics.num_accepted_draft_tokens for outcome in outcomes)
    assert drafted > 5_000 and 0.05 < accepted / drafted < 0.95
    target, draft = map(distribution_of, models)
    assert p_value(counts, target) > P_LIMIT > p_value(counts, (1 - bias) * target + bias * draft)


@pytest.mark.slow
def test_trees_have_the_targets_distribution(services: Services, models: tuple[Path, Path]):
    """The same with trees alone: n = 104,000 tokens, in rounds of which most have several paths."""
    outcomes = sample(services, 260, ways=TREES)
    statistics = [outcome.finished.statistics for outcome in outcomes]
    steps, paths = (sum(getattr(own, name) for own in statistics) for name in ("num_spec_steps", "num_paths"))
    assert paths > 1.5 * steps and min(sum(own.num_ngram_accepted_tokens for own in statistics), steps) > 1_000
    counts = transitions(outcomes)
    assert counts.sum() >= 100_000 and p_value(counts, distribution_of(models[0])) > P_LIMIT
    assert p_value(counts, 0.97 * distribution_of(models[0]) + 0.03 * distribution_of(models[1])) < P_LIMIT


@pytest.mark.slow
def test_the_joint_distribution_of_the_first_three_tokens(services: Services, models: tuple[Path, Path]):
    """n = 100,000 short generations: beginnings are where a first round, a bonus token and a re-rooted tree meet."""
    probs = distribution_of(models[0])
    expected = numpy.zeros((VOCABULARY_SIZE,) * 3)
    for first in range(VOCABULARY_SIZE):
        for second in range(VOCABULARY_SIZE):
            for third in range(VOCABULARY_SIZE):
                chain = (
                    probs[PROMPT[0], PROMPT[1], first] * probs[PROMPT[1], first, second] * probs[first, second, third]
                )
                expected[first, second, third] = chain
    counts = numpy.zeros_like(expected)
    outcomes = sample(services, 100_000, max_tokens=3)
    for outcome in outcomes:
        counts[tuple(outcome.token_ids)] += 1
    enough = expected * counts.sum() >= 5
    statistic = ((counts - expected * counts.sum()) ** 2 / (expected * counts.sum()))[enough].sum()
    assert stats.chi2.sf(statistic, int(enough.sum()) - 1) > P_LIMIT


def continuations(prompt: list[int], top_k: int, length: int) -> dict[tuple[int, ...], dict[int, float]]:
    """Returns the shipped target's distribution of the next token after every text of likeliest tokens, fewer than
    `length`: text -> token -> probability, by `transformers` without a cache."""
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32)
    found: dict[tuple[int, ...], dict[int, float]] = {}
    texts: list[tuple[int, ...]] = [()]
    for _ in range(length):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1].double()
        likeliest = logits.topk(top_k)
        for text, tokens, kept in zip(texts, likeliest.indices.tolist(), likeliest.values):
            found[text] = dict(zip(tokens, torch.softmax(kept, -1).tolist()))
        texts = [(*text, token) for text in texts for token in found[text]]
    return found


@pytest.mark.slow
def test_heads_and_predictions_have_the_targets_distribution():
    """n = 100,000 tokens of the shipped target with its heads, in texts of five tokens so that all 121 contexts of its
    three likeliest tokens can be enumerated. Half of the texts predict their likeliest continuation, which is right
    often and has all its probability on one token; a quarter has drawn siblings of the draft beside heads. The same
    sample rejects a bias of 5 % towards the likeliest token."""
    prompt, top_k, length, text_count = [532, 279, 307, 1040, 8], 3, 5, 20_000  # `for i in range(`
    probs = continuations(prompt, top_k, length)
    likeliest: list[int] = []
    for _ in range(length):
        own = probs[tuple(likeliest)]
        likeliest.append(max(own, key=own.__getitem__))
    drafted = {"draft_window": 8, "draft_nodes_per_step": 4, "draft_siblings": 2, "draft_wait_ms": 20}
    ways = (
        fixed(6, proposers=["PROPOSER_HEADS"]),
        fixed(6, proposers=["PROPOSER_PREDICTION"]),
        fixed(6, proposers=["PROPOSER_HEADS", "PROPOSER_PREDICTION"]),
        fixed(8, proposers=["PROPOSER_DRAFT", "PROPOSER_HEADS"], **drafted),
    )
    asked = {"prompt": prompt, "max_tokens": length, "top_k": top_k, "temperature": 1.0, "ignore_eos": True}
    requests = [
        {
            **asked,
            "speculative": {**ways[index % 4], "rule": "RULE_REJECTION"},
            "prediction": likeliest if index % 4 in (1, 2) else (),
        }
        for index in range(text_count)
    ]
    heads = {"heads": str(MODELS / "target-heads")}
    with running(MODELS / "target", MODELS / "draft", threads=1, dtype="float32", target=heads) as services:
        outcomes = services.client.generate_all(requests, width=16)
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for outcome in outcomes:
        assert len(outcome.token_ids) == length
        for place, token in enumerate(outcome.token_ids):
            counts[tuple(outcome.token_ids[:place])][token] += 1
    used = [outcome.finished.statistics for outcome in outcomes]
    assert sum(own.num_paths for own in used) > sum(own.num_spec_steps for own in used) + 1_000
    for source in ("model", "heads", "prediction"):
        offered, accepted = (
            sum(getattr(own, f"num_{source}_{what}_tokens") for own in used) for what in ("draft", "accepted")
        )
        assert accepted > 1_000 and accepted < 0.95 * offered, (source, accepted, offered)

    def p_of(bias: float) -> float:
        statistic, freedom = 0.0, 0
        for context, seen in counts.items():
            own, total = probs[context], seen.total()
            assert seen.keys() <= own.keys()
            likely = max(own, key=own.__getitem__)
            expected = {token: total * ((1 - bias) * p + bias * (token == likely)) for token, p in own.items()}
            if min(expected.values()) >= 5:
                statistic += sum((seen[token] - count) ** 2 / count for token, count in expected.items())
                freedom += len(own) - 1
        return float(stats.chi2.sf(statistic, freedom))

    assert p_of(0.0) > P_LIMIT > p_of(0.05)
