"""What a replica's page says: its steps, its sessions and its cache. docs/metrics.md says what each is good for.

Each has the label `replica`, target or draft, so that the two can stand on one dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from specdec.engine.scheduler import Engine
from specdec.protocol.types import Description
from specdec.replica.figures import CacheBlocks, ReplicaFigures, SessionCounts
from specdec.telemetry.metrics import common_families, counter, gauge, histogram

COUNTERS = {
    "prefix_query_tokens": ("specdec_prefix_cache_queries", "Tokens of sessions taken in that were looked up."),
    "prefix_hit_tokens": ("specdec_prefix_cache_hits", "Those of them that the cache held."),
    "evictions": ("specdec_evictions", "Sessions that gave their room to an older one."),
    "reopenings": ("specdec_reopenings", "Evicted sessions that were read again."),
}


def idle_families(name: str) -> Iterator[Metric]:
    """Of a replica whose model is still loading."""
    return common_families(name, False, {"model": ""})


def families(
    name: str,
    is_serving: bool,
    description: Description,
    engine: Engine,
    figures: ReplicaFigures,
    sessions: SessionCounts,
    counts: Mapping[str, int],
) -> Iterator[Metric]:
    """All families of the page, as things stand. May be called from any thread; `counts` are the handler's own."""
    facts = {
        "model": description.model_name,
        "dtype": description.dtype,
        "device": description.device,
        "ranks": str(description.tensor_parallel_size),
    }
    yield from common_families(name, is_serving, facts)
    labels = {"replica": name}
    yield histogram("specdec_step_time_seconds", "One step: forward and evidence.", figures.step_time, labels)
    yield histogram("specdec_step_rows", "Rows of a step, all sessions together.", figures.step_rows, labels)
    yield histogram("specdec_step_sessions", "Sequences a step served.", figures.step_sessions, labels)
    yield gauge("specdec_sessions", "Sessions open.", sessions.held, labels)
    yield gauge("specdec_sessions_waiting", "Sessions that wait for room in the cache.", sessions.waiting, labels)
    yield gauge("specdec_sessions_max", "Most sessions at a time; more are refused.", sessions.most, labels)
    help = "Items of coordinators that could not be done, by the reason of the error."
    failures = {(reason,): count for reason, count in dict(figures.failures).items()}
    yield counter("specdec_item_failures", help, failures, labels, "reason")
    blocks = CacheBlocks.of(engine)
    help = "Share of the cache that sessions hold, 0 to 1."
    yield gauge("specdec_kv_cache_usage_perc", help, blocks.usage, labels)
    states = {("held",): blocks.held, ("kept",): blocks.kept, ("free",): blocks.free}
    help = "Blocks of the cache: held by sessions, kept for whoever begins alike, free."
    yield gauge("specdec_kv_cache_blocks", help, states, labels, "state")
    for key, (metric, help) in COUNTERS.items():
        if key in counts:
            yield counter(metric, help, counts[key], labels)
