"""Metrics of a server from made-up times, and the arrivals of requests: pure functions, no service."""

from __future__ import annotations

import statistics

import numpy
import pytest

from specdec.client.events import Finished, Started
from specdec.client.load import OFF, ON, Answer, Block, arrivals
from specdec.client.ratios import Ratio, ratio_of
from specdec.client.serving_metrics import metrics_of, percentile, ratios_in_turns, same_texts
from specdec.errors import ReplicaUnavailable
from specdec.protocol.types import FinishReason, Rule
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import types_pb2 as types_pb

TIMES = pytest.approx  # of sums of binary fractions, equal but for the last digit


def answer(
    sent_s: float,
    deltas: list[tuple[float, int]],
    ended_s: float,
    number: int = 0,
    prompt_tokens: int = 10,
    **counts: int,
) -> Answer:
    """A request that ended, with these counts of its statistics."""
    tokens = sum(count for _, count in deltas)
    finished = Finished(FinishReason.LENGTH, "", None, prompt_tokens, tokens, pb.Statistics(**counts), "")
    own = Answer(token_ids=list(range(tokens)), deltas=deltas, finished=finished)
    own.number, own.sent_s, own.ended_s = number, sent_s, ended_s
    own.started = Started("", 0, Rule.COUPLED, "", prompt_tokens, tokens, "", types_pb.NumericsProfile())
    return own


def block(way: str, turn: int, seconds: float, tokens: int = 4, failure: bool = False) -> Block:
    """A complete block of one request, whose tokens come one by one at even distances."""
    own = answer(0.0, [((place + 1) * seconds / tokens, 1) for place in range(tokens)], seconds, turn)
    own.failure = ReplicaUnavailable("lost") if failure else None
    return Block(way, turn, 0.0, True, [own])


def test_metrics_are_those_of_the_times():
    """Claim: each metric is what its name says in `vllm bench serve`: of a request sent at 1 s whose tokens came at 1.5
    (one), 2 (three) and 3 s (one) and which ended at 3.5 s, and one of a single token in a second block. Conclusive:
    every number is worked out beside it, all are binary fractions."""
    counts = {"num_spec_steps": 2, "num_draft_tokens": 4, "num_accepted_draft_tokens": 3, "draft_link_bytes": 60}
    first = Block(ON, 1, 1.0, True, [answer(1.0, [(1.5, 1), (2.0, 3), (3.0, 1)], 3.5, **counts)])
    second = Block(ON, 2, 8.0, True, [answer(8.25, [(8.5, 1)], 9.5, 1, 20)])
    assert metrics_of([first, second]) == TIMES(
        {
            "completed": 2,
            "failed": 0,
            "duration": 4.0,
            "total_input_tokens": 30,
            "total_output_tokens": 6,
            "request_throughput": 0.5,
            "output_throughput": 1.5,
            "total_token_throughput": 9.0,
            "mean_ttft_ms": 375.0,
            "median_ttft_ms": 375.0,
            "p99_ttft_ms": 250.0 + 0.99 * 250.0,
            "mean_tpot_ms": 500.0,  # (3.5 - 1.5) / 4; the other has no second token
            "median_tpot_ms": 500.0,
            "p99_tpot_ms": 500.0,
            "mean_itl_ms": 750.0,  # 500 and 1000: between messages
            "median_itl_ms": 750.0,
            "p99_itl_ms": 995.0,
            "mean_e2el_ms": 1875.0,
            "median_e2el_ms": 1875.0,
            "p99_e2el_ms": 1250.0 + 0.99 * 1250.0,
            "spec_decode_acceptance_rate": 0.75,
            "spec_decode_acceptance_length": 2.5,
            "spec_decode_num_drafts": 2,
            "spec_decode_draft_tokens": 4,
            "spec_decode_accepted_tokens": 3,
            "draft_link_bytes_per_token": 10.0,
        }
    )


def test_failed_requests_are_counted_only():
    """Claim: a request that failed after its first tokens is in no throughput and no time; without any that ended there
    are no times at all."""
    failed = block(ON, 1, 2.0, failure=True)
    found = metrics_of([failed, block(ON, 2, 4.0)])
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (1, 1, 4)
    assert found["mean_e2el_ms"] == 4000.0 and found["duration"] == 6.0
    assert metrics_of([failed]) == {
        "completed": 0,
        "failed": 1,
        "duration": 2.0,
        "total_input_tokens": 0,
        "total_output_tokens": 0,
        "request_throughput": 0.0,
        "output_throughput": 0.0,
        "total_token_throughput": 0.0,
    }
    assert metrics_of([])["completed"] == 0


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.99, 1.0])
def test_percentiles_are_numpys(share):
    """Claim: a percentile is the one that `vllm bench serve` prints, which asks numpy."""
    for values in ([3.0], [5.0, 1.0], [0.5, 9.0, 2.0, 2.0, 7.5, 4.25]):
        assert percentile(values, share) == pytest.approx(numpy.percentile(values, 100 * share))


def test_ratios_pair_the_blocks_of_a_turn():
    """Claim: each turn is a pair, whatever the order of its blocks; a turn that lacks a way, was cut short or had a
    failed request is none. Worked out: on takes half the time of off in turn 1, a quarter in turn 2."""
    cut, failing = block(ON, 4, 1.0), block(OFF, 5, 1.0, failure=True)
    cut.is_complete = False
    blocks = [block(ON, 1, 1.0), block(OFF, 1, 2.0), block(OFF, 2, 4.0), block(ON, 2, 1.0), block(ON, 3, 1.0)]
    blocks += [cut, block(OFF, 4, 1.0), failing, block(ON, 5, 1.0)]
    found = ratios_in_turns(blocks)
    assert found["output_throughput"] == found["request_throughput"] == Ratio(3.0, 2.0, 4.0, 2)
    for name in ("mean_ttft_ms", "median_tpot_ms", "mean_itl_ms", "mean_e2el_ms"):
        assert found[name] == Ratio(0.375, 0.25, 0.5, 2), name
    assert ratios_in_turns(blocks[4:]) == {} == ratios_in_turns([])


def test_the_interval_leaves_out_what_it_may():
    """Claim: of 5 pairs the interval is all; of 9 it leaves out one at each end, of 12 two. Worked out: the binomial
    tail of 1/2 that is at most 2.5 % has 0, 1 and 2 (1/512 + 9/512; 1, 12 and 66 of 4096)."""
    for count, left_out in ((5, 0), (9, 1), (12, 2)):
        own = ratio_of([float(value) for value in range(count)])
        assert (own.low, own.high) == (left_out, count - 1 - left_out)


def test_same_texts_are_those_of_both_ways():
    """Claim: prompts that both ways answered are counted, and those among them whose tokens are equal; a rule that
    promises no equal text is left out."""
    blocks = [block(ON, 1, 1.0), block(OFF, 1, 2.0), block(ON, 2, 1.0), block(OFF, 2, 1.0, tokens=5), block(ON, 3, 1.0)]
    assert same_texts(blocks) == (1, 2)
    started = Started("", 0, Rule.REJECTION, "", 1, 4, "", types_pb.NumericsProfile())
    blocks[3].answers[0].started = started
    assert same_texts(blocks) == (1, 1)


def test_arrivals_are_a_poisson_process():
    """Claim: arrivals follow from the seed, begin at 0 and never go back; their gaps have the mean and the deviation of
    an exponential distribution; without a rate all are due at once. Conclusive: over 20,000 gaps both are within 4
    standard errors, and the seed is fixed."""
    due_s = arrivals(20_001, 4.0, 7)
    gaps = [after - before for before, after in zip(due_s, due_s[1:])]
    assert due_s[0] == 0.0 and min(gaps) >= 0.0 and due_s == arrivals(20_001, 4.0, 7) != arrivals(20_001, 4.0, 8)
    assert statistics.fmean(gaps) == pytest.approx(0.25, abs=4 * 0.25 / 20_000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=4 * (2 / 20_000) ** 0.5)
    assert arrivals(3, float("inf"), 1) == [0.0, 0.0, 0.0] and arrivals(0, 1.0, 1) == []
