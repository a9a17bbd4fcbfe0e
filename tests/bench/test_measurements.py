"""From samples to measurements: medians and their intervals, acceptance by position, fair comparisons."""

from __future__ import annotations

import random
from dataclasses import fields

import pytest

from bench.pipeline.measurements import hazards, over_best_other, paired_gain
from bench.pipeline.samples import Sample, ends_in_cycle
from bench.pipeline.simulated import between
from bench.pipeline.sweep import Cell, differing_prompts
from bench.pipeline.variants import AUTO, CHAIN, OFF, TREE, request_of, synchronous
from bench.results import ratio_of
from specdec.rpc.convert_generate import request_from_message
from specdec.v1 import coordinator_service_pb2 as pb

GREEDY, REJECTION = "GREEDY, temperature 0", "REJECTION, temperature 0.7"


def sample(variant: str, prompt_id: int, tokens_per_s: float, **others: object) -> Sample:
    """A sample with zeros in all other fields."""
    zeros = {f.name: "" if f.type == "str" else () if f.type.startswith("tuple") else 0 for f in fields(Sample)}
    own = {"variant": variant, "prompt_id": prompt_id, "tokens_per_s": tokens_per_s, "rule": GREEDY, "output_tokens": 2}
    return Sample(**(zeros | {"rounds": 1} | own | others))


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


def test_acceptance_by_position_is_of_rounds_that_reached_it() -> None:
    """Claim: position i's acceptance is the share of rounds with more than i accepted among those with at least i."""
    samples = [sample("sync 2", 0, 1.0, acceptance_histogram=(5, 3, 2)), sample("sync 2", 1, 1.0)]
    assert hazards(samples, 2) == (5 / 10, 2 / 5)
    assert hazards([], 2) == ()


def test_variants_are_compared_on_the_same_prompts() -> None:
    """Claim: a variant with easier prompts gains nothing by them.

    Conclusive: the variant is twice as fast on the common prompts and measured on one more, where it crawls.
    """
    off = [sample("off", 0, 10.0), sample("off", 1, 20.0)]
    tree = [sample("tree", 0, 20.0), sample("tree", 1, 40.0), sample("tree", 2, 1.0)]
    cell = Cell(GREEDY, 0.0, 0.2, {}, samples=[*off, *tree])
    assert cell.gain("tree", "off") == 2.0
    assert cell.measurements["tree"].tokens_per_s == 30.0
    assert paired_gain(tree[:2], off) == 2.0


def test_the_best_synchronous_variant_is_the_fastest_on_the_same_prompts() -> None:
    """Claim: the baseline is the strongest draft length in hindsight; without one there is none."""
    samples = [sample("off", 0, 10.0), sample("sync 1", 0, 12.0), sample("sync 4", 0, 15.0), sample("auto", 0, 30.0)]
    assert Cell(GREEDY, 0.0, 0.2, {}, samples=samples).best_synchronous() == "sync 4"
    assert Cell(GREEDY, 0.0, 0.2, {}, samples=samples[:1]).best_synchronous() is None


def test_a_different_text_is_noticed_where_it_is_a_defect() -> None:
    """Claim: under a reproducible rule a prompt whose text depends on the variant is named; under REJECTION none is."""
    samples = [sample("off", 7, 1.0, text_digest="a"), sample("auto", 7, 1.0, text_digest="b")]
    assert differing_prompts(Cell(GREEDY, 0.0, 0.2, {}, samples=samples)) == (7,)
    assert differing_prompts(Cell(REJECTION, 0.0, 0.2, {}, samples=samples)) == ()


def test_step_times_between_what_was_measured() -> None:
    """Claim: times are straight lines through the points, carried on beyond the last, never below the first."""
    seconds = between({1: 10.0, 4: 13.0, 8: 21.0})
    assert [round(seconds(count) * 1e3, 9) for count in (1, 2, 4, 6, 8, 10)] == [10, 11, 13, 17, 21, 25]


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


def test_the_best_other_variant_is_chosen_on_other_prompts() -> None:
    """Claim: auto is not compared with a variant's lucky gain on the same prompts.

    Conclusive: two fixed variants, each twice as fast as the other on one half of the prompts and as auto on neither.
    """
    rates = {"auto": (10, 10, 10, 10), "chain": (20, 5, 20, 5), "tree": (5, 20, 5, 20)}
    samples = {name: [sample(name, i, float(rate)) for i, rate in enumerate(own)] for name, own in rates.items()}
    own = over_best_other(samples, "auto")
    assert own is not None and (own.low, own.high, own.pair_count) == (2.0, 2.0, 4)
    assert over_best_other({name: own[:1] for name, own in samples.items()}, "auto") is None
    assert over_best_other({"auto": samples["auto"]}, "auto") is None


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
