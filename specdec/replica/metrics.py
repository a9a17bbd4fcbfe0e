"""What a replica counts, and what its page says: its steps, its sessions, its cache. docs/metrics.md says what each is
good for.

Each has the label `replica`, target or draft, so that the two can stand on one dashboard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.core import Metric

from specdec.engine.kv_cache import KVCache
from specdec.engine.scheduler import Engine
from specdec.protocol.items import Failure
from specdec.protocol.types import Description
from specdec.replica.handler import ItemHandler
from specdec.rpc.status import REASONS
from specdec.telemetry.metrics import COUNT_BOUNDS, STEP_BOUNDS_S, Histogram, common_families, counter, gauge, histogram

COUNTERS = {
    "prefix_query_tokens": ("specdec_prefix_cache_queries", "Tokens of sessions taken in that were looked up."),
    "prefix_hit_tokens": ("specdec_prefix_cache_hits", "Those of them that the cache held."),
    "evictions": ("specdec_evictions", "Sessions that gave their room to an older one."),
    "reopenings": ("specdec_reopenings", "Evicted sessions that were read again."),
}


@dataclass(slots=True)
class ReplicaFigures:
    """What one replica process counts, an addition each; read from other threads."""

    step_time: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    step_rows: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    step_sessions: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))

    def stepped(self, row_count: int, session_count: int, step_s: float) -> None:
        """The engine ran a step."""
        self.step_time.add(step_s)
        self.step_rows.add(row_count)
        self.step_sessions.add(session_count)

    def failed(self, failure: Failure) -> None:
        """An item of a coordinator could not be done."""
        self.failures[failure.reason] += 1


def families(
    name: str,
    is_serving: bool,
    description: Description,
    engine: Engine[Any, Any],
    figures: ReplicaFigures,
    handler: ItemHandler,
) -> Iterator[Metric]:
    """All families of the page, as things stand. May be called from any thread: each figure on its own is right."""
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
    waiting_count, most = handler.service.waiting_count, handler.session_count_max
    yield gauge("specdec_sessions", "Sessions open.", len(handler.sessions), labels)
    yield gauge("specdec_sessions_waiting", "Sessions that wait for room in the cache.", waiting_count, labels)
    yield gauge("specdec_sessions_max", "Most sessions at a time; more are refused.", most, labels)
    help = "Items of coordinators that could not be done, by the reason of the error."
    failures = {(reason,): count for reason, count in figures.failures.items()}
    yield counter("specdec_item_failures", help, failures, labels, "reason")
    yield from cache_families(engine.cache, labels)
    counts = handler.service.counters()
    for key, (metric, help) in COUNTERS.items():
        if key in counts:
            yield counter(metric, help, counts[key], labels)


def cache_families(cache: KVCache, labels: dict[str, str]) -> Iterator[Metric]:
    """Blocks of the cache: held by sessions, kept for whoever begins alike, free."""
    kept, free = cache.kept_block_count, max(0, cache.free_block_count - cache.kept_block_count)
    yield gauge("specdec_kv_cache_usage_perc", "Share of the cache that sessions hold, 0 to 1.", cache.usage, labels)
    states = {("held",): cache.block_count - 1 - free - kept, ("kept",): kept, ("free",): free}
    help = "Blocks of the cache: held by sessions, kept for whoever begins alike, free."
    yield gauge("specdec_kv_cache_blocks", help, states, labels, "state")
