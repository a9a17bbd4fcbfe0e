"""From samples to ratios: medians and their intervals, the best of other variants; the variants as requests."""

from __future__ import annotations

import random

import pytest

from bench.results import Cell, Results, ratio_of
from specdec.protocol.types import Rule
from specdec.rpc.convert_generate import request_from_message
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.samples import ends_in_cycle
from tests.support.variants import (
    AUTO,
    CHAIN,
    OFF,
    RULE_NAMES,
    RULES_DEFAULT,
    TREE,
    is_reproducible,
    request_of,
    rule_of,
    synchronous,
)

REJECTION = "REJECTION 0.7"
CELL: Cell = {"rule": "GREEDY"}


def test_the_interval_of_a_median_holds_it_as_often_as_it_says() -> None:
    """Claim: the interval holds the true median in at least 95 % of experiments, and is no wider than necessary.

    Conclusive: 4,000 experiments of a skewed distribution with known median; three standard errors are one percent.
    """
    chance = random.Random(5)
    for count in (9, 30):
        held = 0
        for _ in range(4000):
            own = ratio_of([chance.expovariate(1.0) for _ in range(count)])
            held += own.low <= 0.6931471805599453 <= own.high
        assert 0.94 <= held / 4000 <= 0.985, count


def test_a_ratio_of_few_pairs_spans_all_of_them() -> None:
    """Claim: with too few pairs for 95 % the interval spans all samples, never less."""
    assert (ratio_of([1.0]).low, ratio_of([1.0]).high) == (1.0, 1.0)
    own = ratio_of([0.9, 1.3, 1.1])
    assert (own.low, own.median, own.high) == (0.9, 1.1, 1.3)


@pytest.mark.parametrize("variant", [OFF, AUTO, CHAIN, TREE, synchronous(3)], ids=lambda variant: variant.name)
def test_every_variant_is_a_request_the_service_takes(variant) -> None:
    """Claim: each variant's request passes every check of a request and has the variant's values."""
    asked = request_of(variant, REJECTION, "text", 8)
    request = request_from_message(asked)
    assert request.sampling.max_tokens == 8 and request.sampling.temperature == 0.7
    message = asked.speculative
    if variant in (OFF, AUTO):
        assert message.policy == (pb.POLICY_OFF if variant is OFF else pb.POLICY_AUTO)
    else:
        assert message.policy == pb.POLICY_FIXED
        said = (
            message.num_speculative_tokens,
            message.draft_window,
            message.draft_nodes_per_step,
            message.draft_wait_ms,
        )
        assert said == (variant.draft_length, variant.window, variant.nodes_per_step, variant.wait_ms)


def test_short_names_of_rules_say_rule_and_temperature() -> None:
    """Claim: every short name stands for the rule and the temperature that it says, as the long name at its place does,
    and those with a seed are reproducible."""
    for name, long in zip(RULE_NAMES, RULES_DEFAULT, strict=True):
        kind, _, temperature = name.partition(" ")
        assert rule_of(name) == rule_of(long) == (Rule[kind], float(temperature or 0))
        assert is_reproducible(name) is (kind != "REJECTION")


def rates(**by_variant: tuple[float, ...]) -> Results:
    """Results of one cell."""
    samples = {name: {"tokens_per_s": [*map(float, own)]} for name, own in by_variant.items()}
    return Results({}, [(CELL, samples)])


def test_the_best_other_variant_is_chosen_on_other_turns() -> None:
    """Claim: auto is not compared with a variant's lucky gain on the same prompts, and with the best where one is so on
    all of them; without two turns or others there is no ratio.

    Conclusive: two fixed variants, each twice as fast as the other on one half of the prompts and as auto on neither.
    """
    others = ("chain", "tree")
    lucky = rates(auto=(10, 10, 10, 10), chain=(20, 5, 20, 5), tree=(5, 20, 5, 20))
    own = lucky.over_best(CELL, "auto", others, "tokens_per_s")
    assert own is not None and (own.low, own.high, own.pair_count) == (2.0, 2.0, 4)
    steady = rates(auto=(10, 20, 10), chain=(8, 16, 8), tree=(5, 10, 4))
    own = steady.over_best(CELL, "auto", others, "tokens_per_s")
    assert own is not None and (own.low, own.high, own.pair_count) == (1.25, 1.25, 3)
    assert rates(auto=(10,), chain=(20,)).over_best(CELL, "auto", others, "tokens_per_s") is None
    assert rates(auto=(10, 10)).over_best(CELL, "auto", others, "tokens_per_s") is None


@pytest.mark.parametrize(
    ("token_ids", "is_cyclic"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16], False),
        ([9, 8, *[1, 2, 3, 4] * 3], True),
        ([9, 8, *[1, 2, 3, 4] * 2, 1, 2, 3], False),
        ([5] * 11, False),
        ([7] * 12, True),
        ([*range(60), *[1, 2] * 6], True),
        ([*range(120), *[1, 2] * 6], False),
        ([], False),
    ],
)
def test_a_text_that_ends_in_a_cycle_is_known(token_ids: list[int], is_cyclic: bool) -> None:
    """Claim: three repetitions, twelve tokens and a sixth of the text are a cycle, less is not; whatever the period."""
    assert ends_in_cycle(token_ids) is is_cyclic
