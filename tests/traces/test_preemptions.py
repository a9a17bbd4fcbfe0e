"""Preemptions in traces: real processes, a cache too small for the requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from specdec.traces.facts import WAIT_MS_MIN, facts_of
from specdec.traces.reader import TraceTree, spans_of
from tests.support.otlp_receiver import Receiver
from tests.support.services import running
from tests.support.traces import SOON, ReadTrace, attributes, environment, trace_of

BLOCK_SIZE, TABLE_BYTES_PER_POSITION = 16, 8
TOKEN_COUNT, REQUEST_COUNT, SPACE_COUNT = 237, 8, 5


@pytest.mark.more
def test_preemptions_are_reported_where_they_happen(table_models, receiver: Receiver):
    """Claim: the spans of a preempted generation have events where it was preempted, as many preemptions as the
    response's statistics count; other generations have none. In words they say so, and who waited for blocks.

    Conclusive: eight generations in a cache for five, so some are preempted, and one alone, which is not.
    """
    common = {"otlp_traces_endpoint": receiver.endpoint}
    block_count = SPACE_COUNT * -(-(3 + TOKEN_COUNT) // BLOCK_SIZE) + 1
    cache = {"kv_cache_bytes": block_count * BLOCK_SIZE * TABLE_BYTES_PER_POSITION, "block_size": BLOCK_SIZE}
    with environment(**SOON), running(*table_models, common, threads=1, **common, **cache) as services:
        alone = services.client.generate([1, 2], max_tokens=40, ignore_eos=True)
        with ThreadPoolExecutor(REQUEST_COUNT) as pool:
            asked = {"max_tokens": TOKEN_COUNT, "temperature": 1, "ignore_eos": True}
            running_ones = [
                pool.submit(services.client.generate, [1, 2, seed], seed=seed, **asked)
                for seed in range(1, 1 + REQUEST_COUNT)
            ]
            outcomes = [alone, *(one.result() for one in running_ones)]
        traces = [trace_of(receiver, outcome) for outcome in outcomes]
    traced_counts = list(map(preemptions_reported, traces))
    counts = [outcome.finished.statistics.preemptions for outcome in outcomes]
    assert traced_counts == counts and counts[0] == 0 and max(counts) > 0
    for outcome, trace, count in zip(outcomes, traces, counts, strict=True):
        found = receiver.as_json(bytes.fromhex(outcome.finished.trace_id))["resourceSpans"]
        told = [one.sentence for one in facts_of(TraceTree(spans_of(found))).happened]
        assert any("preempted" in sentence for sentence in told) == (count > 0)
        queue_ms = attributes(trace.named("prefill")[0])["specdec.queue_ms"]
        assert any("in the target's queue" in sentence for sentence in told) == (queue_ms > WAIT_MS_MIN)


def preemptions_reported(trace: ReadTrace) -> int:
    """The number of preemptions in the events of a generation's prefill and round groups."""
    events = [event for group in [*trace.named("prefill"), *trace.groups] for event in group.events]
    found = [event.attributes for event in events if event.name == "preempted by the target"]
    return sum(value.value.int_value for attributes in found for value in attributes if value.key == "specdec.times")
