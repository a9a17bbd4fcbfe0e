"""Evictions in traces: real processes, a cache too small for what is asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from bench.otlp_receiver import Receiver
from tests.support.services import running
from tests.support.traces import SOON, ReadTrace, environment, trace_of

BLOCK_SIZE, TABLE_BYTES_PER_POSITION = 16, 8
TOKEN_COUNT, REQUEST_COUNT, ROOM_COUNT = 237, 8, 5


def test_evictions_are_told_where_they_fall(table_models, receiver: Receiver):
    """Claim: a generation that the target evicted and opened again says so by events of the phase it was in, as often
    as the response's statistics count; others have no such event.

    Conclusive: eight generations in a cache for five, so there are some of the first kind, and one alone.
    """
    told = {"otlp_traces_endpoint": receiver.endpoint}
    block_count = ROOM_COUNT * -(-(3 + TOKEN_COUNT) // BLOCK_SIZE) + 1
    cache = {"kv_cache_bytes": block_count * BLOCK_SIZE * TABLE_BYTES_PER_POSITION, "block_size": BLOCK_SIZE}
    with environment(**SOON), running(*table_models, told, threads=1, **told, **cache) as services:
        alone = services.client.generate([1, 2], max_tokens=40, ignore_eos=True)
        with ThreadPoolExecutor(REQUEST_COUNT) as pool:
            asked = {"max_tokens": TOKEN_COUNT, "temperature": 1, "ignore_eos": True}
            running_ones = [
                pool.submit(services.client.generate, [1, 2, seed], seed=seed, **asked)
                for seed in range(1, 1 + REQUEST_COUNT)
            ]
            outcomes = [alone, *(one.result() for one in running_ones)]
        told_counts = [evictions_told(trace_of(receiver, outcome)) for outcome in outcomes]
    counts = [outcome.finished.statistics.evictions for outcome in outcomes]
    assert told_counts == counts and counts[0] == 0 and max(counts) > 0


def evictions_told(trace: ReadTrace) -> int:
    """How often the phases of a generation say that it was evicted."""
    events = [event for name in ("prefill", "segment") for phase in trace.named(name) for event in phase.events]
    told = [event.attributes for event in events if event.name == "evicted by the target"]
    return sum(value.value.int_value for attributes in told for value in attributes if value.key == "specdec.times")
